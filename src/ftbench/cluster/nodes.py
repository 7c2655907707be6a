"""Connections between the machines (nodes) of one run.

All nodes run the same command on a shared disk, with torchrun's variables MASTER_ADDR, MASTER_PORT and NODE_RANK.
Node 0 creates the run directory and listens. The other nodes ask for its path and then stay connected, so each side
notices when the other ends.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftbench.errors import MissingError

if TYPE_CHECKING:
    from ftbench.launch.ranks import Ended
    from ftbench.spec.experiment import Experiment

ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
MEETING_S = 600.0  # longest wait for the other nodes, as in torchrun
_HELLO_S = 10.0  # longest wait for a line of a connected node
_RETRY_S = 0.2
_LONGEST = 1 << 16  # bytes of a line


def number(spec: Experiment) -> int:
    """Return the number of this node. Raise MissingError if the environment does not define it."""
    count = spec.launch.nodes
    node, port = os.environ.get("NODE_RANK") or os.environ.get("SLURM_NODEID", ""), os.environ.get(PORT, "")
    with suppress(ValueError):
        if 0 <= int(node) < count and 0 < int(port) < 2**16 and os.environ.get(ADDRESS):
            return int(node)
    raise MissingError(
        f"launch.nodes: each of {count} machines needs {ADDRESS} (the first machine), {PORT} (a free port there) and "
        f"NODE_RANK (its number, 0 to {count - 1}; SLURM_NODEID works too): set them, or set launch.nodes to 1"
    )


def listen() -> socket.socket:
    """Return node 0's listening socket. Raise MissingError if its port is in use."""
    try:
        return socket.create_server(("", int(os.environ[PORT])))
    except OSError as error:
        raise MissingError(
            f"{PORT} {os.environ[PORT]} is not available on node 0: {error.strerror}; choose a free port"
        ) from None


def gather(listener: socket.socket, count: int, path: Path, signals_pipe: int) -> dict[socket.socket, int]:
    """Return the connections of all other nodes with their numbers; nothing after a signal.

    Raise MissingError if a node does not join in time.
    """
    joined: dict[socket.socket, int] = {}
    end = time.monotonic() + MEETING_S
    while len(joined) < count - 1:
        streams: list[Any] = [listener, signals_pipe]
        ready, _, _ = select.select(streams, [], [], max(0.0, end - time.monotonic()))
        if signals_pipe in ready:
            return {}
        if not ready:
            raise MissingError(
                f"{count - 1 - len(joined)} of {count} nodes did not join within {MEETING_S:.0f} s: start the same "
                f"command on each node, with {ADDRESS}, {PORT} and a different NODE_RANK"
            )
        line, _ = listener.accept()
        node = _greet(line, path)
        if 0 < node < count and node not in joined.values():
            joined[line] = node
        else:
            line.close()
    return joined


def _greet(line: socket.socket, path: Path) -> int:
    """Send the run directory over a new connection. Return the number of the node that joins, or 0."""
    line.settimeout(_HELLO_S)
    with suppress(OSError, ValueError):
        line.sendall(f"{json.dumps(str(path))}\n".encode())
        return int(_read_line(line))
    return 0


def ask() -> Path:
    """Return the run directory from node 0. Raise MissingError if it does not answer as node 0 does."""
    with closing(_connect()) as line:
        try:
            return Path(json.loads(_read_line(line)))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise MissingError(
                f"{os.environ[ADDRESS]}:{os.environ[PORT]} is not a node of ftbench ({error}): choose another {PORT} "
                "for all nodes"
            ) from None


def join(node: int) -> socket.socket:
    """Join the run as this node, and return the connection to node 0."""
    line = _connect()
    _read_line(line)
    line.sendall(f"{node}\n".encode())
    line.settimeout(None)
    return line


def _connect() -> socket.socket:
    """Return a connection to node 0. Wait until it listens; raise MissingError if it does not in time."""
    where, end = (os.environ[ADDRESS], int(os.environ[PORT])), time.monotonic() + MEETING_S
    while True:
        try:
            return socket.create_connection(where, timeout=MEETING_S)
        except UnicodeError:
            raise MissingError(f"{ADDRESS}={where[0]}: not a valid host name") from None
        except OSError as error:
            if time.monotonic() > end:
                raise MissingError(
                    f"node 0 does not answer at {ADDRESS}={where[0]}, {PORT}={where[1]} ({error}): start the same "
                    "command there, and check that this machine can reach it"
                ) from None
        time.sleep(_RETRY_S)


def _read_line(line: socket.socket) -> str:
    """Return one line. Raise OSError or ValueError if the connection ends or sends something else."""
    with line.makefile("rb", buffering=0) as file:
        text = file.readline(_LONGEST)
    if not text.endswith(b"\n"):
        raise ValueError("unexpected answer")
    return text.decode().rstrip("\n")


def send_ended(line: socket.socket, ended: Ended) -> None:
    """Send node 0 how the ranks of this node have ended."""
    with suppress(OSError):  # node 0 has ended
        line.sendall(f"{json.dumps(list(ended.items()))}\n".encode())


def receive_ended(line: socket.socket) -> Ended:
    """Return how the ranks of another node have ended; empty if the node was lost."""
    with suppress(OSError, ValueError, TypeError, RecursionError), closing(line):
        line.settimeout(_HELLO_S)
        return {int(rank): (int(code), bool(stopped)) for rank, (code, stopped) in json.loads(_read_line(line))}
    return {}
