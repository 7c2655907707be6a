"""A limit to the computing of code that was written by others, such as a chat template."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in the block once it has itself computed for so long. For the main thread alone."""

    def end(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
