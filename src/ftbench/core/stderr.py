"""Write to stderr, which can become unwritable during a run: a pipe or a terminal is closed, or the disk is full."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def optional() -> Iterator[None]:
    """Discard stderr from now on if the block cannot write to it. A run continues without progress lines."""
    try:
        yield
    except OSError:
        discard()


def discard() -> None:
    """Send stderr to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stderr.fileno())
    os.close(null)
