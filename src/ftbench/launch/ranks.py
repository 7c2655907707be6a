"""Start one process per GPU: `python -P -m ftbench.launch.ranks RUN_DIRECTORY GPUS NODES NODE COMMAND…`.

This module sets torchrun's variables, and ends all ranks when one rank fails. Then node 0 writes the run's state. The
state has the number of the rank that failed first. After a hang, the state has the number of the rank with the least
progress. torchrun imports torch before the ranks start, and does not report ranks that hang. So torchrun is not used.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftbench.errors import MissingError
from ftbench.launch.process import signals
from ftbench.launch.process_tree import die_with_parent, exit_like
from ftbench.store.rundir import RunDir, gpus_of, read_json, write_json

if TYPE_CHECKING:
    from ftbench.spec.experiment import Experiment

SHARED_S = 60.0  # longest delay until a network disk shows a file of another node
GRACE_S = 8.0  # time between SIGTERM and SIGKILL; less than half of GRACE_S in process.py
LISTENER = "FTBENCH_RENDEZVOUS"  # variable with the file descriptor of rank 0's listening socket
MEETING = ("MASTER_ADDR", "MASTER_PORT")
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
POSITIONS = ("data", "forward", "backward", "optimizer")  # phases of a step, in order
Ended = dict[int, tuple[int, bool]]  # {rank: (exit code, whether ftbench ended the rank)}


def node_number(spec: Experiment) -> int:
    """Return the number of this machine in the run, from 0. Raise MissingError if environment variables are missing."""
    if spec.launch.nodes == 1:
        return 0
    from ftbench.cluster import nodes

    return nodes.number(spec)


def around(command: Sequence[str], spec: Experiment, run: RunDir) -> list[str]:
    """Return the command that starts `command` once for each rank of this machine."""
    numbers = (spec.launch.gpus_of_node, spec.launch.nodes, node_number(spec))
    return [sys.executable, "-P", "-m", "ftbench.launch.ranks", str(run.path.resolve()), *map(str, numbers), *command]


def too_many(spec: Experiment, described: Mapping[str, Any]) -> list[str]:
    """Return an error message if the machine has too few GPUs. Without a GPU, the ranks run on the CPU."""
    available, ranks = len(gpus_of(described)), spec.launch.gpus_of_node
    if not available or available >= ranks:
        return []
    return [
        f"launch.gpus: {ranks} GPUs requested, but this run sees {available} (`nvidia-smi -L` lists those of the "
        "machine, CUDA_VISIBLE_DEVICES limits them, `ftbench sweep --gpu-ids` gives each run one): use fewer, or try "
        "the strategy on the CPU with CUDA_VISIBLE_DEVICES= (empty)"
    ]


def main(path: str, count: int, nodes: int, node: int, command: Sequence[str]) -> None:
    run, local_ranks = RunDir(Path(path)), range(node * count, (node + 1) * count)
    try:
        with signals() as signals_pipe:
            with _listener(run, nodes, node, signals_pipe) as listener:
                children = [_start(command, rank, count, nodes, listener) for rank in local_ranks]
            ended = _wait(dict(zip(local_ranks, children, strict=True)), signals_pipe)
    except MissingError as error:
        reason = {"state": "error", "reason": str(error), "exit_code": error.exit_code}
        write_json(run.state, read_json(run.state) | reason)
        sys.exit(error.exit_code)
    if node:  # node 0 writes the run's state
        exit_like(max((code for code, _ in ended.values()), key=abs))
    patience = GRACE_S if any(code for code, _ in ended.values()) else SHARED_S
    ended |= _of_other_nodes(run, range(count, nodes * count), patience)
    states = {rank: read_json(run.of_rank(rank).state) for rank in ended}
    for rank in (rank for rank in ended if rank >= count and not states[rank]):
        states[rank] = {"state": "error", "reason": f"its machine (node {rank // count}) was lost"}
    rank, code, details = _verdict(ended, states)
    write_json(run.state, read_json(run.state) | states[rank] | details)
    exit_like(code)


def _listener(run: RunDir, nodes: int, node: int, signals_pipe: int) -> AbstractContextManager[socket.socket | None]:
    """Open the listening socket of rank 0 before the ranks start. Then other programs cannot use its port."""
    if nodes == 1:
        return socket.create_server(("127.0.0.1", 0))
    from ftbench.cluster.nodes import send_path

    return nullcontext() if node else send_path(nodes, run.path, signals_pipe)


def _of_other_nodes(run: RunDir, ranks: range, patience: float) -> Ended:
    """Return how each rank of the other nodes ended. Wait at most `patience` seconds for their files."""
    end = time.monotonic() + patience
    while True:
        states = {rank: read_json(run.of_rank(rank).state).get("state") for rank in ranks}
        if None not in states.values() or time.monotonic() > end:
            return {rank: (int(state != "ok"), state == "interrupted") for rank, state in states.items()}
        time.sleep(0.1)


def _wait(children: Mapping[int, subprocess.Popen[bytes]], signals_pipe: int) -> Ended:
    """Wait until all ranks of this node have ended. Return how each rank ended, in order of time."""
    ended: Ended = {}
    waiting = {os.pidfd_open(child.pid): rank for rank, child in children.items()}
    end: float | None = None
    while waiting:
        timeout = None if end is None else max(0.05, end - time.monotonic())
        ready, _, _ = select.select([*waiting, *([signals_pipe] if end is None else [])], [], [], timeout)
        ending = end is not None or signals_pipe in ready
        for handle in (handle for handle in ready if handle in waiting):
            rank = waiting.pop(handle)
            os.close(handle)
            ended[rank] = children[rank].wait(), ending
        if end is None and (ending or any(code for code, _ in ended.values())):
            end = time.monotonic() + GRACE_S
            for rank in waiting.values():
                children[rank].send_signal(signal.SIGTERM)
        elif end is not None and time.monotonic() > end:
            for rank in waiting.values():
                children[rank].send_signal(signal.SIGKILL)
    return ended


def _start(
    command: Sequence[str], rank: int, count: int, nodes: int, listener: socket.socket | None
) -> subprocess.Popen[bytes]:
    """Start the process of a rank with torchrun's variables. With several nodes, the user has set MASTER_ADDR."""
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    numbers = map(str, (rank, rank % count, nodes * count, count, rank // count))
    env = {"OMP_NUM_THREADS": str(threads), **os.environ} | dict(zip(VARIABLES, numbers, strict=True))
    if listener and nodes == 1:
        env |= dict(zip(MEETING, map(str, listener.getsockname()), strict=True))
    first = {LISTENER: str(listener.fileno())} if listener and rank == 0 else {}
    return subprocess.Popen(
        command, env={**env, **first}, pass_fds=[*map(int, first.values())], preexec_fn=die_with_parent
    )


def _verdict(ended: Ended, states: Mapping[int, dict[str, Any]]) -> tuple[int, int, dict[str, Any]]:
    """Find the rank that caused the end of the run. Return this rank, an exit code, and keys to add to its state.

    A rank that lost the connection to another rank is not the cause. A rank that ftbench ended is not the cause either.
    """
    stopped = [rank for rank, state in states.items() if ended[rank][1] and state.get("state") in (None, "interrupted")]
    failed = [rank for rank, (code, _) in ended.items() if code and rank not in stopped]
    if failed:
        first = min(failed, key=lambda rank: bool(states[rank].get("lost_another")))
        return first, ended[first][0], {"rank": first}
    behind = _behind({rank: states[rank] for rank in sorted(stopped)})
    return (0, max(code for code, _ in ended.values()) if stopped else 0, behind)


def _behind(states: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the rank with the least progress: {"rank": 1, "behind": "backward of step 3"}. Return {} for a tie."""
    points = {rank: _point(state) for rank, state in states.items()}
    if len(points) < 2 or list(points.values()).count(lowest := min(points.values())) > 1:
        return {}
    rank = min(points, key=lambda rank: points[rank])
    where = states[rank].get("phase") or "an unknown phase"
    return {"rank": rank, "behind": f"{where} of step {lowest[0]}" if lowest[0] else str(where).replace("_", " ")}


def _point(state: Mapping[str, Any]) -> tuple[int, int]:
    """Return the progress of a rank: (step, phase index). In the phase `data`, the step of the state is 1 too low."""
    phase = state.get("phase")
    return (state.get("step") or 0) + (phase == "data"), POSITIONS.index(phase) if phase in POSITIONS else -1


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
