"""The measuring child of `ftbench probe`: `python -m ftbench.worker.probe OUT_FILE`."""
