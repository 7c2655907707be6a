"""Predict the memory and time of a run before it starts."""
