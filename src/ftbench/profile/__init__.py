"""Analyse a recorded trace: kernels by group, operators, phases, idle gaps and communication. Does not import torch."""
