"""Run the command `ftbench` with `python -m ftbench`."""

from ftbench.cli import main

main()
