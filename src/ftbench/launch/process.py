"""Run one child process in a separate session, and end the child with all of its descendants (Linux).

The child runs under a supervisor (`process_tree.py`). Signals to ftbench arrive in a pipe. Therefore, a signal does
not interrupt other code. While the child is measured, ftbench waits and uses almost no CPU.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ftbench.errors import MissingError
from ftbench.launch import process_tree

GRACE_S = 20.0  # time between SIGTERM and SIGKILL, in which the child writes the last rows
TICK_S = 0.5
_LOG_TAIL = 64 * 2**10  # bytes


@dataclass(frozen=True, slots=True)
class Stop:
    """The reason why ftbench ends a run. `state` becomes the state of the run: `timeout` or `interrupted`."""

    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class Exit:
    """How a child process ended.

    Attributes:
        code: Exit code. If a signal ended the child, the negative signal number.
        stop: The reason if ftbench ended the child, else None.
        kernel_oom: Whether the kernel's OOM killer probably ended the child.
        wall_s: Seconds from start to end.
    """

    code: int
    stop: Stop | None
    kernel_oom: bool
    wall_s: float


def run_child(
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    signals_pipe: int,
    watch: Callable[[], Stop | None] = lambda: None,
) -> Exit:
    """Run a command until it ends, append its output to `log`, and return how the command ended.

    A byte in `signals_pipe` (see `signals`) ends the command early. `watch` is called about twice per second. If
    `watch` returns a Stop, the command ends early too. Raise MissingError if the command cannot be started.
    """
    kills = _kernel_oom_kills()
    begin = time.monotonic()
    stop = None
    line, theirs = socket.socketpair()  # each side sees the end of the other
    with line, theirs, log.open("ab") as output:
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", process_tree.__file__, *argv], env=env, stdin=theirs.fileno(),
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise MissingError(f"{sys.executable} cannot be started: {error.strerror}") from None
        theirs.close()
        try:
            stop = _wait(line.fileno(), signals_pipe, watch)
        finally:
            _end_all(child, line, signals_pipe)
    killed = child.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL) and stop is None
    return Exit(child.returncode, stop, killed and _kernel_oom_kills() > kills, time.monotonic() - begin)


def run_module(
    name: str, arguments: Sequence[str], env: Mapping[str, str], log: Path, limit_s: float, late: str
) -> str | None:
    """Run a module of ftbench in a child process, for at most `limit_s` seconds.

    Return None after a success, the argument `late` after a timeout, and otherwise a message with the exit code and the
    last line of the log. Raise KeyboardInterrupt after a signal.
    """
    end = time.monotonic() + limit_s

    def watch() -> Stop | None:
        return Stop("timeout", late) if time.monotonic() > end else None

    with signals() as signals_pipe:
        ended = run_child([sys.executable, "-P", "-m", name, *arguments], env, log, signals_pipe, watch)
    if ended.stop and ended.stop.state == "interrupted":
        raise KeyboardInterrupt
    if ended.stop or ended.code == 0:
        return ended.stop.reason if ended.stop else None
    return f"ended with exit code {ended.code}: {last_line(log) or 'no output'}"


def last_line(log: Path) -> str:
    """Return the last non-empty line of a log. If the log is empty or missing, return an empty string."""
    lines = (line.strip() for line in reversed(log_tail(log).splitlines()))
    return next(filter(None, lines), "")[:300]


def log_tail(log: Path) -> str:
    """Return the last 64 KiB of a log. If the log is missing, return an empty string."""
    with suppress(OSError):
        return log.read_bytes()[-_LOG_TAIL:].decode(errors="replace")
    return ""


def _wait(line: int, signals_pipe: int, watch: Callable[[], Stop | None]) -> Stop | None:
    while True:
        ready, _, _ = select.select([line, signals_pipe], [], [], TICK_S)
        if line in ready:
            return None
        if signals_pipe in ready:
            os.read(signals_pipe, 1)
            return Stop("interrupted", "interrupted by a signal")
        if (stop := watch()) is not None:
            return stop


def _end_all(child: subprocess.Popen[bytes], line: socket.socket, signals_pipe: int) -> None:
    """End the child and its descendants. Send SIGTERM to a running child, and kill all processes after GRACE_S seconds.

    A second signal to this process skips the wait.
    """
    ended = line.fileno()
    if not select.select([ended], [], [], 0)[0]:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGTERM)
        select.select([ended, signals_pipe], [], [], GRACE_S)
    with suppress(OSError):
        line.shutdown(socket.SHUT_WR)  # the supervisor kills its descendants
    select.select([ended], [], [], GRACE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # if the supervisor was killed or stopped
    child.wait()


@contextmanager
def signals() -> Iterator[int]:
    """Yield the read end of a pipe. In the `with` block, each SIGTERM, SIGHUP and SIGINT writes one byte to the pipe.

    Ignored signals (nohup) stay ignored. The interpreter itself writes the byte. Therefore, a signal shortly before a
    `select` call ends this call. In a thread other than the main thread, the pipe stays empty.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    main = threading.current_thread() is threading.main_thread()
    handled = [n for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT) if signal.getsignal(n) != signal.SIG_IGN]
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False) if main else -1
    before = {number: signal.signal(number, lambda *_: None) for number in handled} if main else {}
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if main:
            signal.set_wakeup_fd(previous)
        os.close(reader)
        os.close(writer)


def _kernel_oom_kills() -> int:
    """Return how many processes the kernel's OOM killer has killed on this machine, including control groups."""
    with suppress(OSError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0
