"""One training step on tensors without memory: the worker's own code, told that it has a GPU, and a tracker that sees
each of its allocations."""
