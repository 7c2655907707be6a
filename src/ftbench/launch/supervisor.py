"""What stands between ftbench and a run's child: `python -I -S supervisor.py COMMAND…` runs the command and leaves no
descendant of it, in whatever session, however the child or ftbench ends. Linux.

It is a subreaper (prctl(2)): what the child leaves behind becomes a child of this process, also what was forked twice
or is in a session of its own. Its stdin is a pipe that ftbench holds and never writes to: the end of that is the end of
ftbench, or its wish. The child carries a death signal for the end of this process. It imports nothing of ftbench, so
that it starts in no time.
"""

import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.005


def main(command: list[str]) -> None:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    supervisor, ended = os.getpid(), dict[int, int]()
    if (child := os.fork()) == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _become(command, supervisor)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # go to the whole group, and are for the child
        signal.signal(number, lambda *_: None)
    while child not in ended and 0 not in select.select([0, reader], [], [])[0]:
        os.read(reader, 4096)
        _reap(ended)
    while _reap(ended):
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    end_like(os.waitstatus_to_exitcode(ended[child]))


def _become(command: list[str], supervisor: int) -> None:
    try:
        if os.getppid() == supervisor:  # which may have ended before the death signal was asked for
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


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
    main(sys.argv[1:])
