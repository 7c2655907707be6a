"""Run directories → tables and cards. Reads files only; a machine without torch or GPU can report."""
