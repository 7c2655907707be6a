"""Sweeps on Slurm. The rest of ftbench works without this package."""
