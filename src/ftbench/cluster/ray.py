"""`sweep --on ray`: each cell is a Ray task on a running cluster.

A task trains in a temporary directory of its node and returns the run's files, so the nodes need no shared disk.
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
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftbench.cluster import remote
from ftbench.errors import FtbenchError, MissingError, SpecError
from ftbench.launch import runner
from ftbench.launch.runner import FinishedRun, Order
from ftbench.spec.experiment import Experiment
from ftbench.store import rundir
from ftbench.store.rundir import RunDir
from ftbench.sweep.gpu_slots import RunControl, create
from ftbench.sweep.plan.base import Job

RETRIES = 2  # by Ray, after a lost node or worker
_POLL_S = 0.5
_DESCRIBE_S = 60.0  # longest wait for the description of a node
_CONNECT_S = 5.0
_ATTEMPTS, _RETRY_S = 3, 3.0
_THREADS = "OMP_NUM_THREADS"


def slots(on: str, spec: Experiment, stack: ExitStack) -> tuple[Sequence[RaySlot], dict[str, Any]]:
    """Return a slot per GPU of the cluster (per node without GPUs), and the machine.json of a node.

    Raise MissingError without Ray or a cluster, SpecError if the nodes have different GPUs.
    """
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
    counts = [int(node["Resources"].get("GPU", 0)) if with_gpu else 1 for node in chosen]
    shared = max(counts) > 1
    gpu = runner.gpu_name(described)
    return [RaySlot(f"Ray {number + 1}", needs, gpu, shared) for number in range(sum(counts))], described


def _describe_nodes(ray: Any, on: str, spec: Experiment, nodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the machine.json of a node. Raise if a node cannot run ftbench or the GPUs differ."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task, values = ray.remote(remote.describe), spec.model_dump(mode="json")
    options = {"num_cpus": 0, "num_gpus": 0, "max_retries": 0}
    try:
        described = ray.get(
            [task.options(**options, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
             .remote(values, "0") for node in nodes],
            timeout=_DESCRIBE_S,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - any reason why a node does not answer
        raise MissingError(f"--on {on}: a node cannot run ftbench: {_reason(error)}") from None
    kinds = {runner.gpu_name(machine) for machine in described}
    if len(kinds) > 1:
        raise SpecError(
            f"--on {on}: the cluster has {' and '.join(sorted(map(str, kinds)))}: a sweep needs GPUs of one kind"
        )
    return dict(described[0])


def _connect(on: str, stack: ExitStack) -> Any:
    if on != "ray" and not on.startswith("ray://"):
        raise SpecError(
            f"--on {on}: allowed are slurm, slurm:FILE, ray (the cluster of this machine) and ray://host:port"
        )
    if importlib.util.find_spec("ray") is None:
        raise MissingError("--on ray needs Ray: pip install 'ftbench[ray]'")
    address = os.environ.get("RAY_ADDRESS", "auto") if on == "ray" else on
    if address != "auto":
        _require_listener(on, address.removeprefix("ray://"))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    for attempt in range(_ATTEMPTS):  # on a busy machine Ray's client server may start too late
        try:
            ray.init(address=address, namespace="ftbench", log_to_driver=False, logging_level="ERROR",
                     configure_logging=False)  # fmt: skip
            break
        except Exception as error:  # noqa: BLE001 - no cluster, another version, or the client's package is missing
            if attempt < _ATTEMPTS - 1 and "Initialization failure from server" in str(error):
                time.sleep(_RETRY_S)
                continue
            raise MissingError(f"--on {on}: cannot join the Ray cluster: {_reason(error)}") from None
    stack.callback(ray.shutdown)
    return ray


def _require_listener(on: str, address: str) -> None:
    """Raise MissingError if the port is closed. Ray itself would retry for 15 minutes."""
    address = address.rpartition("@")[2]  # the first part may contain a password
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        why = error if isinstance(error, OSError) else "the port is missing"
        raise MissingError(
            f"--on {on}: no answer at {address} ({why}); write ray://host:port with the port of Ray's client server "
            "(10001 by default), or --on ray on a machine of the cluster"
        ) from None


def _reason(error: BaseException) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


@dataclass(slots=True)
class RaySlot:
    """One task at a time. `needs` are its resources; `shared` marks nodes with several GPUs."""

    name: str
    needs: dict[str, Any]
    gpu: str | None
    shared: bool
    trains: bool = field(default=True, init=False)

    def run(self, job: Job, source: bytes, control: RunControl) -> FinishedRun:
        """Train on a node that Ray chooses. Ray retries the task if the node or the worker is lost.

        Raise MissingError if the cluster has no node left.
        """
        import ray

        created = create(job)
        control.show("on the Ray cluster")
        task = ray.remote(train).options(max_retries=RETRIES, **self.needs)
        values = job.spec.model_dump(mode="json")
        ref = task.remote(
            job.run.run_id, values, source, list(job.sets), self.gpu, self.shared, os.environ.get(_THREADS)
        )
        while not ray.wait([ref], timeout=_POLL_S)[0]:
            late = control.deadline is not None and time.monotonic() > control.deadline
            if late or control.stops_within(0):
                ray.cancel(ref, force=True)
                reason = "interrupted by a signal, or the sweep's time budget ran out"
                return remote.ended(created, "interrupted", reason)
            resources = ray.cluster_resources()
            if resources.get("GPU", 0) < self.needs["num_gpus"] or resources.get("CPU", 0) < self.needs["num_cpus"]:
                ray.cancel(ref, force=True)
                raise MissingError("the Ray cluster has no node left; run the same command again when it has one")
        try:
            packed, notes = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, FtbenchError):
                raise error.cause from None
            raise
        except ray.exceptions.RayError as error:
            return remote.ended(created, "error", f"Ray lost the task {RETRIES + 1} times: {_reason(error)}")
        for note in notes:
            control.notify(f"{self.name}: {note}")
        unpack(bytes(packed), created)
        return remote.finished(created)


def train(
    name: str, values: dict[str, Any], source: bytes, sets: list[str], gpu: str | None, shared: bool,
    threads: str | None,
) -> tuple[bytes, list[str]]:  # fmt: skip
    """Train on this node in a temporary directory. Return the packed files and the notes."""
    os.environ.pop(_THREADS, None)  # Ray sets it to 1; `threads` is the user's setting
    if threads is not None:
        os.environ[_THREADS] = threads
    order, notes = Order(Experiment.model_validate(values), source, sets), list[str]()
    with tempfile.TemporaryDirectory(prefix="ftbench-") as folder:
        result = remote.train(lambda: rundir.create_at(Path(folder) / name), order, gpu, shared, notes.append)
        return pack(result.run), notes


def pack(run: RunDir) -> bytes:
    """Return the files of a run as a tar archive. state.json is last, so it exists only in complete runs."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for path in sorted(run.path.rglob("*"), key=lambda path: path == run.state):
            if path.is_file():
                tar.add(path, str(path.relative_to(run.path)))
    return out.getvalue()


def unpack(packed: bytes, run: RunDir) -> None:
    """Write the files into the run directory. Raise MissingError if the disk is full."""
    with rundir.writing(run.path):
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            tar.extractall(run.path, filter="data")
        run.reserve.unlink(missing_ok=True)
