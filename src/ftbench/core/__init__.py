"""Facts and arithmetic: no I/O but the data files that ship with ftbench, no torch."""
