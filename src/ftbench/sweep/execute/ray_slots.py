"""Cells as Ray tasks on a cluster that is running already. Ray is an extra; this module alone imports it.

A task trains in a temporary directory of its node and returns the run's files, so that nodes need no common disk; the
driver claims the directory before and fills it after, and the directories say what is done, as ever.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import socket
import tarfile
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftbench.errors import FtbenchError, MissingError, SpecError
from ftbench.launch import runner
from ftbench.launch.runner import FinishedRun, Order
from ftbench.spec.experiment import Experiment
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.sweep.execute import remote
from ftbench.sweep.execute.gpu_slots import RunControl, claim
from ftbench.sweep.jobs import Job

_POLL_S = 0.5
_ASK_S = 60.0  # for what a node is asked before the first run
_CONNECT_S = 5.0
_RETRY_S = 3.0
_THREADS = "OMP_NUM_THREADS"


def cluster_slots(on: str, spec: Experiment, stack: ExitStack) -> tuple[Sequence[RaySlot], dict[str, Any]]:
    """Return a slot for each GPU of the cluster (each node, where there are no GPUs), and the machine.json of one.
    Raise MissingError without Ray or a cluster, SpecError for nodes of different kinds."""
    ray = _connect(on, stack)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    with_gpu = [node for node in nodes if node["Resources"].get("GPU", 0) >= 1]
    chosen = with_gpu or [node for node in nodes if node["Resources"].get("CPU", 0) >= 1]
    if not chosen:
        raise MissingError(f"--on {on}: no node of this cluster offers a GPU or a CPU")
    needs = {"num_gpus": 1, "num_cpus": 1} if with_gpu else {
        "num_gpus": 0, "num_cpus": min(int(node["Resources"]["CPU"]) for node in chosen)
    }  # fmt: skip
    described = _describe_nodes(ray, on, spec, chosen)
    slots = []
    for node in (node for node in chosen if node["NodeID"] in described):
        count = int(node["Resources"].get("GPU", 0)) if with_gpu else 1
        address = node["NodeManagerAddress"]
        slots += [RaySlot(f"{address}/{slot}" if count > 1 else address, node["NodeID"], needs, count > 1)
                   for slot in range(count)]  # fmt: skip
    return slots, next(iter(described.values()))


def _describe_nodes(ray: Any, on: str, spec: Experiment, nodes: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the machine.json of each node by its id, without those that go away meanwhile. Raise where one cannot run
    ftbench, or is of another kind."""
    free: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, "max_retries": 0}
    task, values = ray.remote(remote.describe), spec.model_dump(mode="json")
    refs = [(node["NodeID"], task.options(**free, **_only(node["NodeID"])).remote(values, "0")) for node in nodes]
    described, why = dict[str, dict[str, Any]](), ""
    for node, ref in refs:
        try:
            described[node] = ray.get(ref, timeout=_ASK_S)
        except (ray.exceptions.NodeDiedError, ray.exceptions.TaskUnschedulableError) as error:
            why = _reason(error)
        except Exception as error:  # noqa: BLE001 - whatever keeps a node from answering
            raise MissingError(f"--on {on}: a node cannot run ftbench: {_reason(error)}") from None
    if not described:
        raise MissingError(f"--on {on}: a node cannot run ftbench: {why}")
    kinds = {runner.gpu_name(machine) for machine in described.values()}
    if len(kinds) > 1:
        raise SpecError(
            f"--on {on}: the cluster has {' and '.join(sorted(map(str, kinds)))}: one sweep runs on one kind of GPU"
        )
    return described


def _connect(on: str, stack: ExitStack) -> Any:
    if on != "ray" and not on.startswith("ray://"):
        raise SpecError(
            f"--on {on}: allowed are slurm, slurm:FILE, ray (the cluster of this machine) and ray://host:port"
        )
    if importlib.util.find_spec("ray") is None:
        raise MissingError("--on ray needs Ray: pip install 'ftbench[ray]'")
    address = os.environ.get("RAY_ADDRESS", "auto") if on == "ray" else on
    if address != "auto":
        _knock(on, address.removeprefix("ray://"))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    # Ray writes news of lost workers to stdout even so, and stdout carries the result.
    with suppress(AttributeError):
        ray._private.worker.print_to_stdstream = lambda *args, **kwargs: None
    for tries_left in (2, 1, 0):
        try:
            ray.init(address=address, namespace="ftbench", log_to_driver=False, logging_level="ERROR",
                     configure_logging=False)  # fmt: skip
            break
        except Exception as error:  # noqa: BLE001 - no cluster, another version, Ray's client without its package
            # Ray's client server starts a process for each driver, and on a busy machine gives up early or is confused
            # by one that ends.
            if tries_left and "Initialization failure from server" in str(error):
                time.sleep(_RETRY_S)
                continue
            raise MissingError(f"--on {on}: cannot join the Ray cluster: {_reason(error)}") from None
    stack.callback(ray.shutdown)
    return ray


def _knock(on: str, address: str) -> None:
    """Raise MissingError where nobody listens: Ray itself would try for a quarter of an hour."""
    address = address.rpartition("@")[2]  # what stands before it may be a password
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        why = error if isinstance(error, OSError) else "no port is named"
        raise MissingError(
            f"--on {on}: nobody answers at {address} ({why}); write ray://host:port with the port of Ray's client "
            "server (10001 unless told otherwise), or --on ray on a machine of the cluster"
        ) from None


def _reason(error: BaseException) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


def _only(node: str) -> dict[str, Any]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


@dataclass(slots=True)
class RaySlot:
    """A GPU of a node. `needs` is what its tasks ask Ray for; `shared` whether the node has other GPUs at work."""

    name: str
    node: str
    needs: dict[str, Any]
    shared: bool
    trains: bool = field(default=True, init=False)

    def run(self, job: Job, source: bytes, control: RunControl) -> FinishedRun:
        """Train on the node; elsewhere as often as a node is lost, and once where a worker alone is, which the run may
        have brought about. Raise MissingError when no node is left."""
        claimed = claim(job)
        control.show(f"on {self.name}")
        lost, workers = set[str](), 0
        while True:
            node = self._choose(lost)
            try:
                packed = self._train(job, source, control, node)
            except _Lost as loss:
                lost.add(node)
                workers += not isinstance(loss, _NodeLost)
                if workers == 2:
                    return remote.ended(claimed, "error", f"two workers were lost with it: {loss}")
                control.say(f"{self.name} was lost ({loss}): trying {job.what} elsewhere")
                continue
            if packed is None:
                return remote.ended(
                    claimed, "interrupted", "interrupted by a signal, or the sweep's time budget ran out"
                )
            unpack(packed, claimed)
            return remote.finished(claimed)

    def _choose(self, lost: Collection[str]) -> str:
        """Return this slot's node, or what has come back at its address, or another that can do the same; one that a
        run has not been lost on, where there is one."""
        import ray

        fits = [node for node in ray.nodes()
                if node["Alive"] and node["Resources"].get("GPU", 0) >= self.needs["num_gpus"]
                and node["Resources"].get("CPU", 0) >= self.needs["num_cpus"]]  # fmt: skip
        if not fits:
            raise MissingError("no node of the Ray cluster is left; the same command goes on once there is one")
        address = self.name.partition("/")[0]
        best = max(
            fits, key=lambda node: (
                node["NodeID"] not in lost, node["NodeID"] == self.node, node["NodeManagerAddress"] == address
            )
        )  # fmt: skip
        return str(best["NodeID"])

    def _train(self, job: Job, source: bytes, control: RunControl, node: str) -> bytes | None:
        """Return the packed files of the run; None if it was told to end."""
        import ray

        task = ray.remote(train).options(max_retries=0, **self.needs, **_only(node))
        values = job.spec.model_dump(mode="json")
        ref = task.remote(job.run.run_id, values, source, list(job.sets), self.shared, os.environ.get(_THREADS))
        while not ray.wait([ref], timeout=_POLL_S)[0]:
            late = control.deadline is not None and time.monotonic() > control.deadline
            if late or control.stops_within(0):
                ray.cancel(ref, force=True)
                return None
            if not any(
                other["Alive"] for other in ray.nodes() if other["NodeID"] == node
            ):  # a node that hangs says nothing
                ray.cancel(ref, force=True)
                raise _NodeLost("the cluster gave its node up")
        try:
            packed, notes = ray.get(ref)
            for note in notes:
                control.say(f"{self.name}: {note}")
            return bytes(packed)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, FtbenchError):
                raise error.cause from None
            raise
        except ray.exceptions.NodeDiedError as error:
            raise _NodeLost(_reason(error)) from None
        except ray.exceptions.RayError as error:
            raise _Lost(_reason(error)) from None


class _Lost(Exception):
    """The worker went away."""


class _NodeLost(_Lost):
    """And its whole node with it."""


def train(
    name: str, values: dict[str, Any], source: bytes, sets: list[str], shared: bool, threads: str | None
) -> tuple[bytes, list[str]]:
    """Train, on a node, in a temporary directory; return its files, and what there was to say."""
    os.environ.pop(_THREADS, None)  # Ray holds its tasks to one thread; `threads` is what the user set, if anything
    if threads is not None:
        os.environ[_THREADS] = threads
    order, notes = Order(Experiment.model_validate(values), source, sets), list[str]()
    with tempfile.TemporaryDirectory(prefix="ftbench-") as folder:
        result = remote.train(lambda: rundir.create_at(Path(folder) / name), order, shared, notes.append)
        return pack(result.run), notes


def pack(run: RunDir) -> bytes:
    """Return the files of a run as a tar, state.json last: with it the run is whole."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for path in sorted(run.path.rglob("*"), key=lambda path: path == run.state):
            if path.is_file():
                tar.add(path, str(path.relative_to(run.path)))
    return out.getvalue()


def unpack(packed: bytes, run: RunDir) -> None:
    """Write the same files into a directory that is claimed. Raise MissingError where the disk does not take them."""
    with rundir.writing(run.path):
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            tar.extractall(run.path, filter="data")
        run.reserve.unlink(missing_ok=True)
