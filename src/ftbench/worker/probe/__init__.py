"""The child process of `ftbench probe` that measures: `python -m ftbench.worker.probe OUT_FILE SECONDS`."""
