"""Data files that ship with ftbench: GPUs, model shapes, the sample data set."""
