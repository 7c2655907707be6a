"""What stands between ftbench and a run's child: `python -I -S supervisor.py GROUP COMMAND…` runs the command and
leaves no descendant of it, in whatever session, however the child or ftbench ends. Linux.

It is two processes, one below the other, so that either does the work where the other is killed with ftbench. Each is a
subreaper (prctl(2)): what the child leaves behind becomes a child of theirs, also what was forked twice or is in a
session of its own. Where there is a control group (`family.py`; GROUP is empty without), the child is in it, and the
kernel ends what is there before they look. Their stdin is a socket whose other side ftbench holds and never writes to:
the end of that is the end of ftbench, or its wish. The child carries a death signal for the end of the lower one.

Beside them waits a guard: where both are killed at the same instant, with ftbench or without, it ends the control group
and whoever carries the child's mark. It is a shell, since what is killed by name is Python. What is left where it is
killed too ends with the next command. This imports nothing of ftbench, so that it starts in no time.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable

MARK = "FTBENCH_FAMILY"  # the environment variable that a child's descendants inherit
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.005
_prctl = ctypes.CDLL(None).prctl
# What is forked meanwhile is found at the next look; what does not die for a broken device is not waited for.
_GUARD = """
read -r _
[ "$2" ] && echo 1 >"$2/cgroup.kill"
for look in 1 2 3 4 5 6 7 8 9; do
    marked=$(grep -lsaF "$1" /proc/[0-9]*/environ)
    [ "$marked" ] || break
    for each in $marked; do
        each=${each%/environ}
        kill -9 "${each#/proc/}"
    done
done
[ "$2" ] && rmdir "$2"
"""


def main(group: str, command: list[str]) -> None:
    line, held = os.pipe2(os.O_CLOEXEC)
    _start_guard(group)

    def lower(upper: int) -> None:
        os.close(held)  # so that the line ends with the upper one
        end_like(_watch(lambda supervisor: _become(command, group, supervisor), (0, line), group))

    end_like(_watch(lower, (0,), group))


def _start_guard(group: str) -> None:
    """Start the guard, which waits for the end of a pipe that is held by this process and those that it forks. It takes
    no hangup: the kernel sends one where it is stopped when this process ends (setpgid(2), orphaned groups)."""
    reader, _ = os.pipe2(os.O_CLOEXEC)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    files = [(os.POSIX_SPAWN_DUP2, source, target) for target, source in enumerate((reader, nothing, nothing))]
    arguments = ["sh", "-c", _GUARD, "sh", f"{MARK}={os.environ[MARK]}", group]
    with contextlib.suppress(OSError):  # there are containers without a shell
        environment = {"PATH": os.defpath}
        os.posix_spawn("/bin/sh", arguments, environment, file_actions=files, setpgroup=0, setsigmask=[signal.SIGHUP])
    os.close(reader)
    os.close(nothing)


def _watch(begin: Callable[[int], None], lines: tuple[int, ...], group: str) -> int:
    """Call `begin` with this process's id in a child; when that ends, or one of `lines` does, leave none of its
    descendants. Return the child's exit code, or minus the signal that ended it."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    supervisor, ended = os.getpid(), dict[int, int]()
    if (child := os.fork()) == 0:
        code = 127
        try:
            begin(supervisor)
        except SystemExit as ending:
            code = int(ending.code or 0)
        finally:
            os._exit(code)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # go to the whole group, and are for the child
        signal.signal(number, lambda *_: None)
    while child not in ended and not {*lines} & {*select.select([*lines, reader], [], [])[0]}:
        os.read(reader, 4096)
        _reap(ended)
    _write(group, "cgroup.kill", "1")
    while _reap(ended) and sum(map(_kill, _children())):
        time.sleep(_POLL_S)
    if group:
        with contextlib.suppress(OSError):
            os.rmdir(group)
    return os.waitstatus_to_exitcode(ended.get(child, signal.SIGKILL))


def _become(command: list[str], group: str, supervisor: int) -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _write(group, "cgroup.procs", "0")
    try:
        if os.getppid() == supervisor:  # which may have ended before the death signal was asked for
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)


def _write(group: str, name: str, text: str) -> None:
    """Write to a file of the control group, where there is one: it may be removed, or take no process."""
    with contextlib.suppress(OSError):
        if group:
            with open(f"{group}/{name}", "w") as file:
                file.write(text)


def _reap(ended: dict[int, int]) -> bool:
    """Add the wait status of each child that has ended; return whether there are others."""
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
            ended.setdefault(pid, status)
    except ChildProcessError:
        return False


def _children() -> list[int]:
    """Return the processes whose parent this one is (proc(5), field 4 of stat)."""
    children = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", errors="replace") as file:
                parent = file.read().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == os.getpid():
            children.append(int(name))
    return children


def _kill(pid: int) -> bool:
    """Kill a process; return whether that is allowed: one of another user (setuid) is left to its owner."""
    try:
        os.kill(pid, signal.SIGKILL)
    except PermissionError:
        return False
    return True


def end_like(code: int) -> None:
    """End with the exit code that a child ended with, or of the signal: minus its number."""
    if code >= 0:
        sys.exit(code)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child's own core says more
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
