"""One child in its own session: log, watch, TERM then KILL, and how it ended. Linux.

The child runs under a supervisor, which leaves nothing of its family (`supervisor.py`). If that is killed itself, this
process ends what `family.py` finds. The parent waits on a socket, so that it uses no CPU while the child is measured.
Signals to the parent (Ctrl-C, a closed terminal, kill) end the child's family and nothing else: they arrive in a pipe,
which is read where this process waits, and never cut into anything.
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

from ftbench.launch import family, supervisor

GRACE_S = 20.0  # between TERM and KILL: time to write the last rows, on a busy machine too
TICK_S = 0.5
_MOST_LOG = 1 << 26  # bytes of what no run prints: installers, probes and simulations say a thousandth


@dataclass(frozen=True, slots=True)
class Stop:
    """That this process ended its child: the state to write down, `timeout` or `interrupted`, and the reason."""

    state: str
    reason: str


@dataclass(frozen=True, slots=True)
class Exit:
    """How a child ended. `code` is its exit code, or minus the signal; `stop` is set where this process ended it;
    `kernel_oom` where the kernel's OOM killer was seen at work; `wall_s` from start to exit on the parent's clock."""

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
    """Run `argv` to its end with stdout and stderr in `log`, or to the first byte in the pipe `signals_pipe` that
    `signals` yields, or until `watch`, which is called about twice a second, says stop."""
    kills = _kernel_oom_kills()
    begin = time.monotonic()
    mark, stop = family.new_mark(), None
    line, theirs = socket.socketpair()  # its end is that of both supervisors, and to them that of this process
    with family.control_group(mark) as group, line, theirs, log.open("ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__, str(group or ""), *argv],
            env={**env, supervisor.MARK: mark},
            stdin=theirs.fileno(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        theirs.close()
        try:
            stop = _wait(line.fileno(), signals_pipe, watch)
        finally:
            _end_family(child, line, signals_pipe, mark)
    killed = child.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL) and stop is None
    return Exit(child.returncode, stop, killed and _kernel_oom_kills() > kills, time.monotonic() - begin)


def run_module(
    name: str, arguments: Sequence[str], env: Mapping[str, str], log: Path, limit_s: float, late: str
) -> tuple[Exit, str | None]:
    """Run a module of ftbench's as `run_to_end` does."""
    return run_to_end([sys.executable, "-P", "-m", name, *arguments], env, log, limit_s, late)


def run_to_end(
    argv: Sequence[str], env: Mapping[str, str], log: Path, limit_s: float, late: str
) -> tuple[Exit, str | None]:
    """Run a child process to its end, at most `limit_s` seconds and a log of _MOST_LOG bytes; return how it ended, and
    in words why not well (`late`, its exit code, its last words). Raise KeyboardInterrupt where a signal ended it."""
    family.end_orphans()
    end = time.monotonic() + limit_s

    def watch() -> Stop | None:
        if log.exists() and log.stat().st_size > _MOST_LOG:
            return Stop("error", "prints without end")
        return Stop("timeout", late) if time.monotonic() > end else None

    with signals() as signals_pipe:
        ended = run_child(argv, env, log, signals_pipe, watch)
    if ended.stop and ended.stop.state == "error":
        os.truncate(log, _MOST_LOG)
    if ended.stop and ended.stop.state == "interrupted":
        raise KeyboardInterrupt
    if ended.stop or ended.code == 0:
        return ended, ended.stop.reason if ended.stop else None
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return ended, f"ended with exit code {ended.code}: {(lines or ['no output'])[-1][:300]}"


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


def _end_family(child: subprocess.Popen[bytes], line: socket.socket, signals_pipe: int, mark: str) -> None:
    """Send TERM to the child's process group unless the child has ended; after the grace have the supervisors kill
    whatever is left. A second signal to this process while it waits skips the wait."""
    ended = line.fileno()
    if not select.select([ended], [], [], 0)[0]:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGTERM)
        select.select([ended, signals_pipe], [], [], GRACE_S)
    with suppress(OSError):
        line.shutdown(socket.SHUT_WR)
    if not select.select([ended], [], [], GRACE_S)[0]:
        child.kill()  # a supervisor that was stopped
        select.select([ended], [], [], GRACE_S)
    child.kill()
    if child.wait() < 0:
        family.end_marked(mark.__eq__)


@contextmanager
def signals() -> Iterator[int]:
    """Yield the reading end of a pipe: within the block TERM, HUP and INT put a byte into it and end nothing, but for
    those that are ignored anyway (nohup). The interpreter's own handler writes it, so that a signal which comes just
    before a wait cuts that short. Only the main thread can; elsewhere nothing arrives."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    main = threading.current_thread() is threading.main_thread()
    heeded = [n for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT) if signal.getsignal(n) != signal.SIG_IGN]
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False) if main else -1  # full, it says no more than one
    before = {number: signal.signal(number, lambda *_: None) for number in heeded} if main else {}
    try:
        yield reader
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if main:
            signal.set_wakeup_fd(woken)
        os.close(reader)
        os.close(writer)


def _kernel_oom_kills() -> int:
    """Return how often the kernel's OOM killer has struck, in this process's control group and on this machine."""
    count, group = 0, family.own_group()
    for path in (*([group / "memory.events"] if group else []), Path("/proc/vmstat")):
        with suppress(OSError):
            lines = path.read_text().splitlines()
            count += sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return count
