"""Machines of one run: the same command on each of them, which share a disk, with the variables that torchrun gives its
workers: MASTER_ADDR and MASTER_PORT, where all meet, and NODE_RANK, which of them this is.

Node 0 claims the run's directory and listens. Each other one asks it where that is, and then joins it: the connection
tells either that the other has ended, whatever ended it.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftbench.errors import MissingError

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment

ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
MEETING_S = 600.0  # how long nodes wait for each other, as torchrun does
_HELLO_S = 10.0  # how long one that has come may take to say who it is
_RETRY_S = 0.2
_LONGEST, _LONGEST_NUMBER = 1 << 16, 9  # characters of a line, of a number
Ended = dict[int, tuple[int, bool]]  # of each rank its exit code, and whether it had been told to end before


def number(spec: Experiment, env: Mapping[str, str] = os.environ) -> int:
    """Return which node of the run this is: 0 of one. Raise MissingError where the environment does not say it."""
    count = spec.launch.nodes
    if count == 1:
        return 0
    node, port = env.get("NODE_RANK") or env.get("SLURM_NODEID", ""), env.get(PORT, "")
    numbers = all(each.isdecimal() and len(each) <= _LONGEST_NUMBER for each in (node, port))
    if numbers and int(node) < count and 0 < int(port) < 2**16 and env.get(ADDRESS):
        return int(node)
    raise MissingError(
        f"launch.nodes: each of {count} machines is told where they meet: set {ADDRESS} to the first of them, {PORT} "
        f"to a port that is free there, and NODE_RANK to the number of this one, from 0 to {count - 1} (Slurm's "
        "SLURM_NODEID does as well), or set launch.nodes to 1"
    )


def listen() -> socket.socket:
    """Return the socket at which the nodes meet. Raise MissingError where another process has its port."""
    try:
        return socket.create_server(("", int(os.environ[PORT])))
    except OSError as error:
        raise MissingError(
            f"{PORT} {os.environ[PORT]} cannot be had on node 0: {error.strerror}; choose a port that is free there"
        ) from None


def gather(listener: socket.socket, count: int, path: Path, signals_pipe: int) -> dict[socket.socket, int]:
    """Return the connections of all other nodes, with their numbers, once they have joined; none where a signal came.
    Raise MissingError where one does not come."""
    joined: dict[socket.socket, int] = {}
    end = time.monotonic() + MEETING_S
    while len(joined) < count - 1:
        streams: list[Any] = [listener, signals_pipe]
        ready, _, _ = select.select(streams, [], [], max(0.0, end - time.monotonic()))
        if signals_pipe in ready:
            return {}
        if not ready:
            raise MissingError(
                f"{count - 1 - len(joined)} of {count} nodes did not come within {MEETING_S:.0f} s: start the same "
                f"command on each, with {ADDRESS}, {PORT} and a NODE_RANK of its own"
            )
        line, _ = listener.accept()
        node = _greeted(line, path)
        if 0 < node < count and node not in joined.values():
            joined[line] = node
        else:
            line.close()
    return joined


def _greeted(line: socket.socket, path: Path) -> int:
    """Tell one that has come where the run's directory is; return which node joins by it, 0 for one that does not."""
    line.settimeout(_HELLO_S)
    with suppress(OSError, ValueError):
        line.sendall(f"{json.dumps(str(path))}\n".encode())
        return int(_read_line(line)[: _LONGEST_NUMBER + 1])
    return 0


def ask() -> Path:
    """Return the run's directory, as node 0 says. Raise MissingError where another service answers, or none."""
    with closing(_connected()) as line:
        try:
            return Path(json.loads(_read_line(line)))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise MissingError(
                f"what answers at {os.environ[ADDRESS]}:{os.environ[PORT]} is no node of ftbench's ({error}): choose "
                f"another {PORT}, the same for each node"
            ) from None


def join(node: int) -> socket.socket:
    """Return the connection by which this node takes part."""
    line = _connected()
    _read_line(line)
    line.sendall(f"{node}\n".encode())
    line.settimeout(None)
    return line


def _connected() -> socket.socket:
    """Return a connection to node 0, which may not listen yet. Raise MissingError where it never does."""
    where, end = (os.environ[ADDRESS], int(os.environ[PORT])), time.monotonic() + MEETING_S
    while True:
        try:
            return socket.create_connection(where, timeout=MEETING_S)
        except UnicodeError:
            raise MissingError(f"{ADDRESS}={where[0]}: is no name of a machine") from None
        except OSError as error:
            if time.monotonic() > end:
                raise MissingError(
                    f"node 0 does not answer at {ADDRESS}={where[0]}, {PORT}={where[1]} ({error}): start the same "
                    "command there, and see that this machine reaches it"
                ) from None
        time.sleep(_RETRY_S)


def _read_line(line: socket.socket) -> str:
    """Return a line of text. Raise ValueError for a connection that ends before, OSError for one that is slow, or for a
    line that is no node's."""
    text, end = b"", time.monotonic() + (line.gettimeout() or MEETING_S)
    while not text.endswith(b"\n"):
        if len(text) > _LONGEST or time.monotonic() > end:
            raise TimeoutError("its line has no end")
        if not (more := line.recv(1)):
            raise ValueError("the connection has ended")
        text += more
    return text.decode().rstrip("\n")


def tell(line: socket.socket, ended: Ended) -> None:
    """Tell node 0 how the ranks of this one have ended."""
    with suppress(OSError):  # node 0 has ended before
        line.sendall(f"{json.dumps(list(ended.items()))}\n".encode())


def hear(line: socket.socket) -> Ended:
    """Return how the ranks of a node have ended; nothing of one that has gone without a word that a node says."""
    with suppress(OSError, ValueError, TypeError, RecursionError), closing(line):
        line.settimeout(_HELLO_S)
        codes = json.loads(_read_line(line))
        return {int(rank): (int(code), bool(ordered)) for rank, (code, ordered) in codes}
    return {}
