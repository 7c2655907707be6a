"""Data sets, tokenization and batches."""
