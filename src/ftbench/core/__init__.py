"""Facts and arithmetic. No torch, and no I/O except reading the shipped data files."""
