"""Writing to stderr, which a long run may lose: the reader of a pipe ends, the terminal is closed, the disk is full."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def optional() -> Iterator[None]:
    """Discard stderr from now on if the block cannot write to it: a run must not end because of its progress."""
    try:
        yield
    except OSError:
        discard()


def discard() -> None:
    """Send stderr to /dev/null."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stderr.fileno())
    os.close(null)
