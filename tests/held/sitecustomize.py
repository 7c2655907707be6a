"""On PYTHONPATH, this makes mock runs on cluster nodes wait while the file FTBENCH_TEST_HELD exists."""

from __future__ import annotations

import os
import sys
import time

if "ftbench.launch.mock" in sys.orig_argv and (file := os.environ.get("FTBENCH_TEST_HELD")):
    sleep = time.sleep

    def wait(seconds: float) -> None:
        sleep(seconds)
        while os.path.exists(file):
            sleep(0.01)

    time.sleep = wait
