"""Limits to what code computes and takes that was written by others, such as a chat template."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What a chat template may make of one dialogue, and take for it: the longest context is a third of that.
RENDERED_CHARACTERS, RENDERING_BYTES = 1 << 24, 1 << 30


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raise TimeoutError in the block once it has itself computed for so long. For the main thread alone."""

    def end(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s, limit_s)  # again, as what is in the block may catch it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """Raise MemoryError in the block where the process asks for so many bytes more than it has. Not for a block that
    calls what ends the process instead, as a tokenizer in Rust does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    lowest = min(limit for limit in (own + more, soft, hard) if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
