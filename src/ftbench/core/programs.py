"""The answer of another program, of which nothing is known: it may print without end, or never answer."""

import errno
import os
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from subprocess import DEVNULL, PIPE, CompletedProcess, Popen, TimeoutExpired
from typing import IO

_LONGEST, _PART = 1 << 20, 1 << 16  # bytes: of an answer, and of what is read at once


def ask(
    command: Sequence[str], limit_s: float, longest: int = _LONGEST, environment: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Run a program to its end and return what it says. What it leaves behind is killed, and not waited for though it
    holds the pipes. Raise OSError where it cannot be started or prints more than `longest` bytes, of which not many
    more are kept, and TimeoutError (an OSError) where it has not ended after `limit_s` seconds."""
    child = Popen(
        command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True,
        env=environment,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stderr is not None
    with child.stdout, child.stderr:
        try:
            out, error = _said(child.pid, (child.stdout, child.stderr), time.monotonic() + limit_s, longest)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with suppress(TimeoutExpired):  # one that waits in the kernel for a disk outlives KILL
                child.wait(timeout=2)
    return CompletedProcess(command, child.returncode, out, error)


def _said(process: int, pipes: Sequence[IO[bytes]], until: float, longest: int) -> list[str]:
    """Return what came out of each pipe until the process has ended."""
    said, ended = {pipe.fileno(): bytearray() for pipe in pipes}, os.pidfd_open(process)
    try:
        with selectors.DefaultSelector() as selector:
            for source in (*said, ended):
                selector.register(source, selectors.EVENT_READ)
            while True:
                left = until - time.monotonic() if ended in selector.get_map() else 0.0
                ready = [key.fd for key, _ in selector.select(max(left, 0.0))]
                if not ready:
                    if ended in selector.get_map():
                        raise TimeoutError(errno.ETIMEDOUT, "does not answer")
                    return [text.decode(errors="replace") for text in said.values()]
                for source in ready:
                    part = os.read(source, _PART) if source != ended else b""
                    if part:
                        said[source] += part
                    else:
                        selector.unregister(source)
                if sum(map(len, said.values())) > longest:
                    raise OSError(errno.EFBIG, "prints without end")
    finally:
        os.close(ended)
