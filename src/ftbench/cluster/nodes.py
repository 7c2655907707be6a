"""Connect the machines (nodes) of a run. The user starts the same command on each node, with torchrun's variables.

All nodes share a disk. Node 0 creates the run directory and sends its path to the other nodes. Then the ranks start.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftbench.errors import MissingError
from ftbench.spec.experiment import Experiment

ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"
MEETING_S = 600.0  # longest wait for the other nodes, as in torchrun
_HELLO_S = 10.0  # longest wait for a message from a connected node
_RETRY_S = 0.2


def number(spec: Experiment) -> int:
    """Return the number of this node from the environment variables. Raise MissingError if a variable is missing."""
    count = spec.launch.nodes
    node, port = os.environ.get("NODE_RANK") or os.environ.get("SLURM_NODEID", ""), os.environ.get(PORT, "")
    with suppress(ValueError):
        if 0 <= int(node) < count and 0 < int(port) < 2**16 and os.environ.get(ADDRESS):
            return int(node)
    raise MissingError(
        f"launch.nodes: each of {count} machines needs {ADDRESS} (the first machine), {PORT} (a free port there) and "
        f"NODE_RANK (its number, 0 to {count - 1}; SLURM_NODEID works too): set them, or set launch.nodes to 1"
    )


def send_path(count: int, path: Path, signals_pipe: int) -> socket.socket:
    """Send the path of the run directory to all other nodes. Stop at a signal. Return the open socket for rank 0."""
    try:
        listener = socket.create_server(("", int(os.environ[PORT])))
    except OSError as error:
        raise MissingError(f"{PORT} {os.environ[PORT]}: {error.strerror} on node 0; choose a free port") from None
    joined, end = set[str](), time.monotonic() + MEETING_S
    while len(joined) < count - 1:
        streams: list[Any] = [listener, signals_pipe]
        ready, _, _ = select.select(streams, [], [], max(0.0, end - time.monotonic()))
        if signals_pipe in ready:
            break
        if not ready:
            listener.close()
            raise MissingError(
                f"{count - 1 - len(joined)} of {count} nodes did not join within {MEETING_S:.0f} s: start the same "
                f"command on each node, with {ADDRESS}, {PORT} and a different NODE_RANK"
            )
        line, _ = listener.accept()
        with line, suppress(OSError):
            line.settimeout(_HELLO_S)
            if (node := line.recv(16).decode(errors="replace")) in map(str, range(1, count)):
                line.sendall(f"{json.dumps(str(path))}\n".encode())
                joined.add(node)
    return listener


def receive_path(node: int) -> Path:
    """Connect to node 0, and return the path of the run directory. Raise MissingError without a valid answer."""
    where, end = (os.environ[ADDRESS], int(os.environ[PORT])), time.monotonic() + MEETING_S
    while True:
        try:
            with socket.create_connection(where, timeout=_HELLO_S) as line, line.makefile("rb") as file:
                line.sendall(str(node).encode())
                return Path(json.loads(file.readline(1 << 16)))
        except (ValueError, TypeError) as error:
            raise MissingError(
                f"{ADDRESS}={where[0]}, {PORT}={where[1]} is not a node of ftbench ({error}): choose another {PORT} "
                "for all nodes"
            ) from None
        except OSError as error:
            if time.monotonic() > end:
                raise MissingError(
                    f"node 0 does not answer at {ADDRESS}={where[0]}, {PORT}={where[1]} ({error}): start the same "
                    "command there, and check that this machine can reach it"
                ) from None
        time.sleep(_RETRY_S)
