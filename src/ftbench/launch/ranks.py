"""Start one process per GPU: `python -P -m ftbench.launch.ranks RUN_DIRECTORY GPUS NODES NODE COMMAND…`.

It sets torchrun's variables and ends all ranks as soon as one fails. Node 0 writes the run's state, with the rank that
failed first or, after a hang, the rank that is behind. torchrun is not used: it imports torch before the ranks start,
its error file has no entry for a rank that hangs or is killed, and on several nodes it does not name the lost one.
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
from ftbench.launch.process import signals
from ftbench.launch.process_tree import die_with_parent, exit_like
from ftbench.store.rundir import RunDir, gpus_of, read_json, write_json

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment

GRACE_S = 8.0  # between SIGTERM and SIGKILL; ftbench waits more than twice as long
LISTENER = "FTBENCH_RENDEZVOUS"  # variable with the file descriptor of rank 0's listening socket
MEETING = ("MASTER_ADDR", "MASTER_PORT")
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
POSITIONS = ("data", "forward", "backward", "optimizer")  # phases of a step, in order
Ended = dict[int, tuple[int, bool]]  # by rank: exit code, and whether it was told to end before


@dataclass(frozen=True, slots=True)
class _Node:
    """Machine `number` of `total`, each with `count` ranks."""

    count: int
    total: int
    number: int

    def ranks(self, node: int) -> range:
        return range(node * self.count, (node + 1) * self.count)

    def environment(self, rank: int) -> dict[str, str]:
        """Return torchrun's variables for a rank of this node."""
        numbers = {"RANK": rank, "LOCAL_RANK": rank % self.count, "WORLD_SIZE": self.total * self.count,
                   "LOCAL_WORLD_SIZE": self.count, "GROUP_RANK": self.number}  # fmt: skip
        return {name: str(value) for name, value in numbers.items()}

    def ended(self, line: socket.socket, node: int, stopped: bool) -> Ended:
        """Return how the ranks of another node have ended, from its connection. A lost node has failed."""
        from ftbench.cluster import nodes

        ended = nodes.receive_ended(line)
        return ended if {*ended} == {*self.ranks(node)} else dict.fromkeys(self.ranks(node), (1, stopped))


def node_number(spec: Experiment) -> int:
    """Return the number of this machine in the run. Raise MissingError if the environment does not define it."""
    if spec.launch.nodes == 1:
        return 0
    from ftbench.cluster import nodes

    return nodes.number(spec)


def around(command: Sequence[str], spec: Experiment, run: RunDir) -> list[str]:
    """Return the command that runs `command` once per rank of this machine."""
    numbers = (spec.launch.gpus_of_node, spec.launch.nodes, node_number(spec))
    return [sys.executable, "-P", "-m", "ftbench.launch.ranks", str(run.path.resolve()), *map(str, numbers), *command]


def too_many(spec: Experiment, described: Mapping[str, Any]) -> list[str]:
    """Return an error if the machine has too few GPUs. Without any GPU the ranks run on the CPU."""
    available, ranks = len(gpus_of(described)), spec.launch.gpus_of_node
    if not available or available >= ranks:
        return []
    return [
        f"launch.gpus: {ranks} GPUs requested, but this run sees {available} (`nvidia-smi -L` lists those of the "
        "machine, CUDA_VISIBLE_DEVICES limits them, `ftbench sweep --gpu-ids` gives each run one): lower it, or try "
        "the strategy on the CPU with CUDA_VISIBLE_DEVICES= (empty)"
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
    if machine.number:  # node 0 writes the run's state
        exit_like(max((code for code, _ in ended.values()), key=abs))
    states = {rank: read_json(run.of_rank(rank).state) or _lost(rank, machine) for rank in ended}
    rank, code, more = _verdict(ended, states)
    write_json(run.state, read_json(run.state) | states[rank] | more)
    exit_like(code)


def _lost(rank: int, machine: _Node) -> dict[str, Any]:
    """Return the state of a rank that wrote none. A lost node cannot write to the disk."""
    node = rank // machine.count
    return {"state": "error", "reason": f"the connection to node {node} was lost"} if node else {}


def _run(command: Sequence[str], machine: _Node, run: RunDir, signals_pipe: int) -> Ended:
    """Run the ranks to their end. Return how each has ended, in the order of their ends; node 0 includes all nodes."""
    ended: Ended = {}
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
            ending |= bool(machine.number)  # node 0 has ended
        if end is None and (ending or any(code for code, _ in ended.values())):
            end = time.monotonic() + GRACE_S
            _stop([children[rank] for rank in waiting.values()], {} if machine.number else lines)
        elif end is not None and time.monotonic() > end:
            _send(signal.SIGKILL, [children[rank] for rank in waiting.values()])
            if time.monotonic() > end + GRACE_S:
                ended |= {rank: (1, True) for node in lines.values() for rank in machine.ranks(node)}
                lines = {}
    _report(lines, ended)
    return ended


def _report(lines: Mapping[socket.socket, int], ended: Ended) -> None:
    """Send node 0 how the ranks of this node have ended."""
    if lines:
        from ftbench.cluster import nodes

        for line in lines:
            nodes.send_ended(line, ended)


def _stop(children: Sequence[subprocess.Popen[bytes]], lines: Mapping[socket.socket, int]) -> None:
    """Ask these ranks and nodes to end."""
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
    return subprocess.Popen(
        command, env={**env, **first}, pass_fds=[*map(int, first.values())], preexec_fn=die_with_parent
    )


@contextmanager
def _meeting(
    machine: _Node, run: RunDir, signals_pipe: int
) -> Iterator[tuple[socket.socket | None, dict[str, str], dict[socket.socket, int]]]:
    """Yield rank 0's listening socket, the variables with its address, and the connections to other nodes.

    The socket is open before the ranks start, so no other program can take its port.
    """
    if machine.total > 1:
        from ftbench.cluster import nodes

        if machine.number:
            yield None, {}, {nodes.join(machine.number): 0}
            return
        with nodes.listen() as listener:
            yield listener, {}, nodes.gather(listener, machine.total, run.path, signals_pipe)
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = ("127.0.0.1", str(listener.getsockname()[1]))
            yield listener, dict(zip(MEETING, address, strict=True)), {}


def _verdict(ended: Ended, states: Mapping[int, dict[str, Any]]) -> tuple[int, int, dict[str, Any]]:
    """Return the rank whose state becomes the run's, its exit code, and additions to the state.

    A rank that lost the connection to another one is not the cause, and neither is one that was told to end.
    """
    stopped = [rank for rank, state in states.items() if ended[rank][1] and state.get("state") in (None, "interrupted")]
    failed = [rank for rank, (code, _) in ended.items() if code and rank not in stopped]
    if failed:
        first = min(failed, key=lambda rank: bool(states[rank].get("lost_another")))
        return first, ended[first][0], {"rank": first}
    behind = _behind({rank: states[rank] for rank in sorted(stopped)})
    return (0, max(code for code, _ in ended.values()) if stopped else 0, behind)


def _behind(states: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the rank that is behind all others, by the step and phase that they wrote when they were told to end."""
    points = {rank: _point(state) for rank, state in states.items()}
    if len(points) < 2 or list(points.values()).count(lowest := min(points.values())) > 1:
        return {}
    rank = min(points, key=lambda rank: points[rank])
    where = states[rank].get("phase") or "an unknown phase"
    return {"rank": rank, "behind": f"{where} of step {lowest[0]}" if lowest[0] else str(where).replace("_", " ")}


def _point(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return the progress of a rank: its step, which starts with the data, and the position in it."""
    phase = state.get("phase")
    return (state.get("step") or 0) + (phase == "data"), POSITIONS.index(phase) if phase in POSITIONS else -1


if __name__ == "__main__":
    main(sys.argv[1], _Node(*map(int, sys.argv[2:5])), sys.argv[5:])
