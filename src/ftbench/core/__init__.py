"""Shared helpers: statistics, FLOPs, units, GPU facts, text tables, data formats. No module here imports torch."""
