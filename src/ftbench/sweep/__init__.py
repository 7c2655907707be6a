"""Run many specs unattended: choose the next run and its GPU, and write the tables."""
