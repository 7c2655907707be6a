"""What to run: frozen objects without I/O; only load.py reads files."""
