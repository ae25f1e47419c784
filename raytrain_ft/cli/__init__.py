"""The command line, `raytrain-ft`: a module for each command or family of commands, and what they print and read."""
