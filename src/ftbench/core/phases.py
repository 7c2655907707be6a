"""The parts of a training step, as the ranges of a profile name them."""

PREFIX = "ftbench."  # of a range's name in a trace
DATA, FORWARD, LOSS, METRICS, BACKWARD = "data", "forward", "loss", "metrics", "backward"
CLIP, OPTIMIZER = "clip", "optimizer"
OTHER = "other"  # what no range covers
