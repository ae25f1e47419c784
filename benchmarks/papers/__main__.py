"""The numbers of the three papers beside ours: by arithmetic, by the production code's decisions, and by the simulator.

    python -m benchmarks.papers [--quick] --json FILE

Every table and figure that can be reached is printed with the deviation, every constant that was fitted is named, and of the
others it is said why not. Then the simulator's predictions are compared with runs of this project.
"""

from __future__ import annotations

from benchmarks.harness import main
from benchmarks.papers import run

if __name__ == "__main__":
    main(run, __doc__)
