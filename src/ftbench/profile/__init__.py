"""Analyse a recorded trace: kernels by group, phases, idle time and communication. Does not import torch."""
