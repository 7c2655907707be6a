"""A process for each GPU of a run: `python -P -m ftbench.launch.ranks RUN_DIRECTORY COUNT NODES NODE COMMAND…` starts
the command once for each rank of this machine, with the variables that torchrun sets, and ends all as soon as one
does not end well, on whichever of the nodes.

Each rank writes a state of its own; node 0 makes the run's of them, which names the rank that was first to fail,
or that is behind the others where nothing moves. It imports no more than it needs, so that it starts in no time.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftbench.errors import MissingError
from ftbench.launch import nodes
from ftbench.launch.process import signals
from ftbench.launch.supervisor import end_like
from ftbench.store.rundir import RunDir, gpus_of, read_json, write_json

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment

GRACE_S = 8.0  # between TERM and KILL; ftbench itself waits more than twice as long
_RANK_GB = 0.5  # GiB that a process has taken once torch and trl are imported
LISTENER = "FTBENCH_RENDEZVOUS"  # the environment variable that tells rank 0 the descriptor of its socket
MEETING = (nodes.ADDRESS, nodes.PORT)
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
# Where in a step a rank can be, in this order.
POSITIONS = ("data", "forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class _Node:
    """One machine of a run: its `number` of the `total`, with `count` ranks on each."""

    count: int
    total: int
    number: int

    def ranks(self, node: int) -> range:
        """Return the ranks of a node."""
        return range(node * self.count, (node + 1) * self.count)

    def environment(self, rank: int) -> dict[str, str]:
        """Return what tells a rank of this node which one it is."""
        numbers = {"RANK": rank, "LOCAL_RANK": rank % self.count, "WORLD_SIZE": self.total * self.count,
                   "LOCAL_WORLD_SIZE": self.count, "GROUP_RANK": self.number}  # fmt: skip
        return {name: str(value) for name, value in numbers.items()}

    def ended(self, line: socket.socket, node: int, ordered: bool) -> nodes.Ended:
        """Return how the ranks of another node have ended, which has something to say, or is gone."""
        ended = nodes.hear(line)
        return ended if {*ended} == {*self.ranks(node)} else dict.fromkeys(self.ranks(node), (1, ordered))


def around(command: Sequence[str], spec: Experiment, run: RunDir) -> list[str]:
    """Return the command that runs `command` once for each rank of this machine."""
    numbers = (spec.launch.gpus_of_node, spec.launch.nodes, nodes.number(spec))
    return [sys.executable, "-P", "-m", "ftbench.launch.ranks", str(run.path.resolve()), *map(str, numbers), *command]


def too_many(spec: Experiment, described: Mapping[str, Any]) -> list[str]:
    """Return, as a sentence, that a spec asks for more GPUs than a machine.json has; where there is none at all the
    ranks run on the CPU, as many as its memory takes."""
    there, ranks = len(gpus_of(described)), spec.launch.gpus_of_node
    if there and there < ranks:
        return [
            f"launch.gpus: {ranks} GPUs are asked for and this run sees {there} (`nvidia-smi -L` lists those of the "
            "machine, CUDA_VISIBLE_DEVICES limits them, `ftbench sweep --gpus` gives each run one): lower it, or try "
            "the strategy on the CPU with CUDA_VISIBLE_DEVICES= (empty)"
        ]
    memory = (described.get("cpu") or {}).get("memory_gb")
    if there or ranks == 1 or spec.launch.mock != "off" or not memory or ranks * _RANK_GB <= memory:
        return []
    return [
        f"launch.gpus: without a GPU {ranks} processes run on the CPU and take {ranks * _RANK_GB:.0f} GiB for their "
        f"libraries alone, and this machine has {memory:.0f} GiB: lower it"
    ]


def main(path: str, machine: _Node, command: Sequence[str]) -> None:
    run = RunDir(Path(path))
    try:
        with signals() as signals_pipe:
            ended = _run(command, machine, run, signals_pipe)
    except MissingError as error:
        if machine.number:
            sys.exit(str(error))
        reason = {"state": "error", "reason": str(error), "exit_code": error.exit_code}
        write_json(run.state, read_json(run.state) | reason)
        sys.exit(error.exit_code)
    if machine.number:  # the run's state is made where all are heard of
        end_like(max((code for code, _ in ended.values()), key=abs))
    states = {rank: read_json(run.of_rank(rank).state) or _gone(rank, machine) for rank in ended}
    rank, code, more = _verdict(ended, states)
    write_json(run.state, read_json(run.state) | states[rank] | more)
    end_like(code)


def _gone(rank: int, machine: _Node) -> dict[str, Any]:
    """Return the state of a rank that wrote none: with its node it may have lost the disk, too."""
    node = rank // machine.count
    return {"state": "error", "reason": f"node {node} has gone without a word"} if node else {}


def _run(command: Sequence[str], machine: _Node, run: RunDir, signals_pipe: int) -> nodes.Ended:
    """Run the ranks to their end; return how each did, in the order of their ends, on node 0 of all nodes."""
    ended: nodes.Ended = {}
    with _meeting(machine, run, signals_pipe) as (listener, variables, lines):
        children = {rank: _start(command, rank, machine, listener, variables) for rank in machine.ranks(machine.number)}
    waiting = {os.pidfd_open(child.pid): rank for rank, child in children.items()}
    end: float | None = None
    while waiting or (lines and not machine.number):
        left = None if end is None else max(0.05, end - time.monotonic())
        handles: list[Any] = [*waiting, *lines, *([signals_pipe] if end is None else [])]
        ready, _, _ = select.select(handles, [], [], left)
        ending = end is not None or signals_pipe in ready
        for handle in (handle for handle in ready if handle in waiting):
            rank = waiting.pop(handle)
            os.close(handle)
            ended[rank] = children[rank].wait(), ending
        for line in (line for line in ready if line in lines):
            node = lines.pop(line)
            ended |= {} if machine.number else machine.ended(line, node, ending)
            ending |= bool(machine.number)  # node 0 speaks by ending
        if end is None and (ending or any(code for code, _ in ended.values())):
            end = time.monotonic() + GRACE_S
            _end([children[rank] for rank in waiting.values()], {} if machine.number else lines)
        elif end is not None and time.monotonic() > end:
            _send(signal.SIGKILL, [children[rank] for rank in waiting.values()])
            if time.monotonic() > end + GRACE_S:
                ended |= {rank: (1, True) for node in lines.values() for rank in machine.ranks(node)}
                lines = {}
    for line in lines:
        nodes.tell(line, ended)
    return ended


def _end(children: Sequence[subprocess.Popen[bytes]], lines: Mapping[socket.socket, int]) -> None:
    """Tell these ranks and nodes to end."""
    _send(signal.SIGTERM, children)
    for line in lines:
        with suppress(OSError):
            line.shutdown(socket.SHUT_WR)


def _send(number: int, children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        with suppress(ProcessLookupError):
            child.send_signal(number)


def _start(
    command: Sequence[str], rank: int, machine: _Node, listener: socket.socket | None, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    threads = max(1, len(os.sched_getaffinity(0)) // machine.count)
    env = {"OMP_NUM_THREADS": str(threads), **os.environ, **variables} | machine.environment(rank)
    first = {LISTENER: str(listener.fileno())} if listener and rank == 0 else {}
    return subprocess.Popen(command, env={**env, **first}, pass_fds=[*map(int, first.values())])


@contextmanager
def _meeting(
    machine: _Node, run: RunDir, signals_pipe: int
) -> Iterator[tuple[socket.socket | None, dict[str, str], dict[socket.socket, int]]]:
    """Yield the socket at which the ranks meet, which nobody else can take before rank 0 listens there, the variables
    that name it, and connections to other nodes. On one machine it is bound to a free port."""
    if machine.number:
        yield None, {}, {nodes.join(machine.number): 0}
    elif machine.total > 1:
        with nodes.listen() as listener:
            yield listener, {}, nodes.gather(listener, machine.total, run.path, signals_pipe)
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = ("127.0.0.1", str(listener.getsockname()[1]))
            yield listener, dict(zip(MEETING, address, strict=True)), {}


def _verdict(
    ended: Mapping[int, tuple[int, bool]], states: Mapping[int, dict[str, Any]]
) -> tuple[int, int, dict[str, Any]]:
    """Return the rank whose state is the run's, the exit code of it, and what the state says besides: the rank, where
    one is to be named. A rank that lost another is not to blame, nor is what was told to end."""
    stopped = [rank for rank, state in states.items() if ended[rank][1] and state.get("state") in (None, "interrupted")]
    failed = [rank for rank, (code, _) in ended.items() if code and rank not in stopped]
    if failed:
        first = min(failed, key=lambda rank: bool(states[rank].get("lost_another")))
        return first, ended[first][0], {"rank": first}
    behind = _behind({rank: states[rank] for rank in sorted(stopped)})
    return (0, max(code for code, _ in ended.values()) if stopped else 0, behind)


def _behind(states: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Return which rank has not come as far as all others, by what they said as they were told to end."""
    points = {rank: _point(state) for rank, state in states.items()}
    if len(points) < 2 or list(points.values()).count(lowest := min(points.values())) > 1:
        return {}
    rank = min(points, key=lambda rank: points[rank])
    where = states[rank].get("phase") or "a place that it could not name"
    return {"rank": rank, "behind": f"{where} of step {lowest[0]}" if lowest[0] else str(where).replace("_", " ")}


def _point(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return how far a rank has come: the step, which begins with its data, and the position in it."""
    phase = state.get("phase")
    return (state.get("step") or 0) + (phase == "data"), POSITIONS.index(phase) if phase in POSITIONS else -1


if __name__ == "__main__":
    main(sys.argv[1], _Node(*map(int, sys.argv[2:5])), sys.argv[5:])
