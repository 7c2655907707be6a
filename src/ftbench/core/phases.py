"""The phases of a training step, as named in a profile."""

PREFIX = "ftbench."  # of range names in a trace
DATA, FORWARD, LOSS, METRICS, BACKWARD = "data", "forward", "loss", "metrics", "backward"
CLIP, OPTIMIZER = "clip", "optimizer"
OTHER = "other"  # not covered by a range
