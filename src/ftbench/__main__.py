"""`python -m ftbench` is `ftbench`."""

from ftbench.cli import main

main()
