"""Load data sets, tokenize samples and build batches."""
