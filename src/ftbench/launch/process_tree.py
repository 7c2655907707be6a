"""The supervisor of a run. `python -I -S process_tree.py COMMAND…` runs a command and ends its descendants (Linux).

The supervisor is a subreaper (prctl(2)): orphaned descendants become its children, even in another session. Its stdin
is a socket to ftbench. When the command ends or ftbench closes the socket, the supervisor kills all of its children. If
the supervisor is killed, the kernel kills the command (parent death signal), and ftbench kills the process group
(`process.py`). This file does not import ftbench, to start fast.
"""

import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.005
_prctl = ctypes.CDLL(None).prctl


def main(command: list[str]) -> None:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    supervisor, ended = os.getpid(), dict[int, int]()
    if (child := os.fork()) == 0:
        try:
            _execute(command, supervisor)
        finally:
            os._exit(127)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # sent to the group, handled by the child
        signal.signal(number, lambda *_: None)
    while child not in ended and 0 not in select.select([0, reader], [], [])[0]:
        os.read(reader, 4096)
        _reap(ended)
    while _reap(ended) and sum(map(_kill, _children())):
        time.sleep(_POLL_S)
    exit_like(os.waitstatus_to_exitcode(ended.get(child, signal.SIGKILL)))


def _execute(command: list[str], supervisor: int) -> None:
    die_with_parent()
    try:
        if os.getppid() == supervisor:  # the supervisor may have ended before the death signal was set
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent process ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _reap(ended: dict[int, int]) -> bool:
    """Add the pid and wait status of each ended child to `ended`. Return whether other children are running."""
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
            ended.setdefault(pid, status)
    except ChildProcessError:
        return False


def _children() -> list[int]:
    """Return the pids of all child processes, from field 4 of /proc/PID/stat (proc(5))."""
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
    """Kill a process. Return False if this is not permitted: the process belongs to another user (setuid)."""
    try:
        os.kill(pid, signal.SIGKILL)
    except PermissionError:
        return False
    return True


def exit_like(code: int) -> None:
    """Exit with the exit code `code`. If `code` is negative, end this process with the signal `-code`."""
    if code >= 0:
        sys.exit(code)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has already written a core dump
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


if __name__ == "__main__":
    main(sys.argv[1:])
