"""One child in its own session: log, timeout, TERM then KILL, and how it ended. Linux.

The parent waits on the child's pidfd, so that it uses no CPU while the child is measured. Signals to the parent
(Ctrl-C, a closed terminal, kill) end the child's whole process group and nothing else.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 8.0  # between TERM and KILL: time to write the last rows
TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class Exit:
    """How a child ended. `code` is its exit code, or minus the signal; `why` is set where this process ended it
    (`timeout`, `interrupted`); `kernel_oom` where the kernel's OOM killer was seen at work; `wall_s` from start to
    exit on the parent's clock."""

    code: int
    why: str | None
    kernel_oom: bool
    wall_s: float


class _Stop(Exception):
    """A signal asked this process to end."""


def run_child(
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    timeout_s: float | None = None,
    on_tick: Callable[[], None] = lambda: None,
) -> Exit:
    """Runs `argv` to its end with stdout and stderr in `log`; `on_tick` is called about twice a second."""
    kills = _kernel_oom_kills()
    begin = time.monotonic()
    why = None
    with _signals_raise() as strike, log.open("ab") as output:
        child = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            strike()
            why = _wait(child, None if timeout_s is None else begin + timeout_s, on_tick)
        except (_Stop, KeyboardInterrupt):
            why = "interrupted"
        finally:
            end_group(child, 0.0 if child.poll() is not None else GRACE_S)
    killed = child.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL) and why is None
    return Exit(child.returncode, why, killed and _kernel_oom_kills() > kills, time.monotonic() - begin)


def _wait(child: subprocess.Popen[bytes], deadline: float | None, on_tick: Callable[[], None]) -> str | None:
    handle = os.pidfd_open(child.pid)
    try:
        while True:
            ready, _, _ = select.select([handle], [], [], TICK_S)
            if ready:
                child.wait()
                return None
            on_tick()
            if deadline is not None and time.monotonic() > deadline:
                return "timeout"
    finally:
        os.close(handle)


def end_group(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """TERM to the child's process group, KILL after `grace_s` to whatever is left of it. A second signal to this
    process while it waits skips the wait."""
    with suppress(subprocess.TimeoutExpired, _Stop, KeyboardInterrupt):
        if grace_s:
            _signal_group(child.pid, signal.SIGTERM)
            child.wait(grace_s)
    while True:
        with suppress(_Stop, KeyboardInterrupt):
            _signal_group(child.pid, signal.SIGKILL)
            child.wait()
            return


def _signal_group(pgid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


@contextmanager
def _signals_raise() -> Iterator[Callable[[], None]]:
    """Turns TERM, HUP and INT into an exception, but for those that are ignored (nohup). A signal that comes earlier
    is held back until the yielded function is called: an exception while the child is started would lose the child.
    Only the main thread can; elsewhere nothing."""
    held: list[int] | None = []

    def stop(number: int, _: object) -> None:
        if held is None:
            raise _Stop
        held.append(number)

    def strike() -> None:
        nonlocal held
        earlier, held = held, None
        if earlier:
            raise _Stop

    if threading.current_thread() is not threading.main_thread():
        yield strike
        return
    heeded = [n for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield strike
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kernel_oom_kills() -> int:
    """How often the kernel's OOM killer has struck, in this process's control group and on this machine."""
    count = 0
    for path in (_cgroup_events(), Path("/proc/vmstat")):
        try:
            lines = path.read_text().splitlines() if path else []
        except OSError:
            continue
        count += sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return count


def _cgroup_events() -> Path | None:
    try:
        entry = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    return Path("/sys/fs/cgroup") / entry[3:].lstrip("/") / "memory.events"
