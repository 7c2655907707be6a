"""A process for each GPU of a run: `python -P -m ftbench.launch.ranks RUN_DIRECTORY COUNT COMMAND…` starts the command
once for each rank, with the variables that torchrun sets, and ends all of them as soon as one does not end well.

Each rank writes a state of its own; this process makes the run's of them, which names the rank that was first to fail,
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftbench.launch.process import signals
from ftbench.launch.supervisor import end_like
from ftbench.store.rundir import RunDir, gpus_of, read_json, write_json

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment

GRACE_S = 3.0  # between TERM and KILL; ftbench itself waits longer
_RANK_GB = 0.5  # GiB that a process has taken once torch and trl are imported
LISTENER = "FTBENCH_RENDEZVOUS"  # the environment variable that tells rank 0 the descriptor of its socket
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Where in a step a rank can be, in this order.
POSITIONS = ("data", "forward", "backward", "optimizer")


def around(command: Sequence[str], spec: Experiment, run: RunDir) -> list[str]:
    """Return the command that runs `command` once for each rank of this machine."""
    own = [sys.executable, "-P", "-m", "ftbench.launch.ranks", str(run.path.resolve()), str(spec.launch.gpus)]
    return [*own, *command]


def too_many(spec: Experiment, described: Mapping[str, Any]) -> list[str]:
    """Return, as a sentence, that a spec asks for more GPUs than a machine.json has; where there is none at all the
    ranks run on the CPU, as many as its memory takes."""
    there, ranks = len(gpus_of(described)), spec.launch.gpus
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


def main(path: str, count: int, command: Sequence[str]) -> None:
    run = RunDir(Path(path))
    with signals() as signals_pipe:
        ended = _run(command, count, signals_pipe)
    states = {rank: read_json(run.of_rank(rank).state) for rank in ended}
    rank, code, more = _verdict(ended, states)
    write_json(run.state, read_json(run.state) | states[rank] | more)
    end_like(code)


def _run(command: Sequence[str], count: int, signals_pipe: int) -> dict[int, tuple[int, bool]]:
    """Run the ranks to their end. Return of each, in the order in which they ended, its exit code and whether it had
    been told to end before."""
    ended: dict[int, tuple[int, bool]] = {}
    with _rendezvous() as (listener, variables):
        children = {rank: _start(command, rank, count, listener, variables) for rank in range(count)}
    waiting = {os.pidfd_open(child.pid): rank for rank, child in children.items()}
    end: float | None = None
    while waiting:
        left = None if end is None else max(0.0, end - time.monotonic())
        ready, _, _ = select.select([*waiting, *([signals_pipe] if end is None else [])], [], [], left)
        ending = end is not None or signals_pipe in ready
        for handle in (handle for handle in ready if handle in waiting):
            rank = waiting.pop(handle)
            os.close(handle)
            ended[rank] = children[rank].wait(), ending
        if end is None and (ending or any(code for code, _ in ended.values())):
            end = time.monotonic() + GRACE_S
            _send(signal.SIGTERM, [children[rank] for rank in waiting.values()])
        elif end is not None and time.monotonic() > end:
            _send(signal.SIGKILL, [children[rank] for rank in waiting.values()])
    return ended


def _send(number: int, children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        with suppress(ProcessLookupError):
            child.send_signal(number)


def _start(
    command: Sequence[str], rank: int, count: int, listener: socket.socket, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    env = {"OMP_NUM_THREADS": str(threads), **os.environ, **variables} | {name: str(n) for name, n in numbers.items()}
    first = {LISTENER: str(listener.fileno())} if rank == 0 else {}
    return subprocess.Popen(command, env={**env, **first}, pass_fds=[listener.fileno()] if rank == 0 else [])


@contextmanager
def _rendezvous() -> Iterator[tuple[socket.socket, dict[str, str]]]:
    """Yield the socket at which the ranks meet, bound to a free port that nobody else can take before rank 0 listens
    there, and the variables that name it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}


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
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
