"""Data sets and formats → token ids; counts of real, padded and label tokens."""
