"""`python -m raytrain_ft.cli`: where the package is not installed, as in a job's working directory."""

from raytrain_ft.cli.main import main

if __name__ == "__main__":
    main()
