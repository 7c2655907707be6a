"""Analyse a recorded trace without torch: kernels by group, phases, idle time and communication."""
