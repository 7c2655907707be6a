"""Run another program with a time limit."""

import errno
import subprocess
from collections.abc import Mapping, Sequence


def run_program(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program and return its exit code and output.

    Raises:
        OSError: If it cannot be started; TimeoutError (a subclass) if it runs longer than `limit_s` seconds.
    """
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=limit_s,
            env=environment, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimeoutError(errno.ETIMEDOUT, "does not answer") from None
