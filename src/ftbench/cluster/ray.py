"""`sweep --on ray`: each cell is a Ray task on a running cluster.

A task trains in a temporary folder and returns the files of the run. Therefore, the nodes do not need a shared disk. If
a node or a process is lost, Ray starts the task again.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftbench.cluster import remote
from ftbench.errors import FtbenchError, MissingError, SpecError
from ftbench.launch import runner
from ftbench.launch.runner import FinishedRun, RunRequest
from ftbench.spec.experiment import Experiment
from ftbench.store import rundir
from ftbench.sweep.gpu_slots import RunControl, create
from ftbench.sweep.plan.base import Job

RETRIES, _JOIN_TRIES = 2, 3
_POLL_S, _CONNECT_S, _DESCRIBE_S, _STOP_S = 0.5, 5.0, 60.0, 60.0
_THREADS = "OMP_NUM_THREADS"


def slots(on: str, spec: Experiment) -> tuple[Sequence[RaySlot], dict[str, Any]]:
    """Return (slots, content of a node's machine.json). A slot has the GPUs of a run or, without GPUs, is a node."""
    ray, per_run = _connect(on), spec.launch.gpus
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus, cpus = ([int(node[kind]) for node in nodes if node.get(kind, 0) >= 1] for kind in ("GPU", "CPU"))
    if not cpus:
        raise MissingError(f"--on {on}: no node of this cluster offers a GPU or a CPU")
    needs = {"num_gpus": per_run, "num_cpus": 1} if gpus else {"num_gpus": 0, "num_cpus": min(cpus)}
    try:
        task = ray.remote(remote.describe).options(**needs, max_retries=0)
        described = ray.get(task.remote(spec.model_dump(mode="json")), timeout=_DESCRIBE_S)
    except Exception as error:  # noqa: BLE001 - any reason why a node does not answer
        raise MissingError(f"--on {on}: no node is free (`ray status`) or can run ftbench: {_reason(error)}") from None
    shared, count = max(gpus, default=1) > per_run, sum(number // per_run for number in gpus) or len(cpus)
    return [RaySlot(f"Ray {n + 1}", needs, runner.gpu_name(described), shared) for n in range(count)], described


def _connect(on: str) -> Any:
    if on != "ray" and not on.startswith("ray://"):
        raise SpecError(f"--on {on}: allowed are slurm, slurm:FILE, ray (this machine's cluster) and ray://host:port")
    if importlib.util.find_spec("ray") is None:
        raise MissingError("--on ray needs Ray: pip install 'ftbench[ray]'")
    address = os.environ.get("RAY_ADDRESS", "auto") if on == "ray" else on
    if address != "auto":  # Ray itself would try a closed port for minutes
        host, _, port = address.removeprefix("ray://").rpartition("@")[2].rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
        except (OSError, ValueError) as error:
            raise MissingError(
                f"--on {on}: no answer at {host}:{port} ({error}); write ray://host:port with the port of Ray's client "
                "server (10001 by default), or --on ray on a machine of the cluster"
            ) from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    for left in reversed(range(_JOIN_TRIES)):
        try:
            ray.init(address, namespace="ftbench", log_to_driver=False, logging_level="ERROR", configure_logging=False)
            break
        except Exception as error:  # noqa: BLE001 - no cluster, another version, or the client's package is missing
            if not left or not isinstance(error, ConnectionAbortedError):  # a busy head node starts servers slowly
                raise MissingError(f"--on {on}: cannot join the Ray cluster: {_reason(error)}") from None
    return ray


def _reason(error: BaseException) -> str:
    lines = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().splitlines()
    return (lines[-1].strip() if lines else type(error).__name__)[:300]


@dataclass(slots=True)
class RaySlot:
    """A slot that runs one Ray task at a time with the resources `needs`. `shared`: whether nodes have several GPUs."""

    name: str
    needs: dict[str, Any]
    gpu: str | None
    shared: bool
    trains: bool = field(default=True, init=False)

    def run(self, job: Job, source: bytes, control: RunControl) -> FinishedRun:
        """Train a job on a node that Ray chooses, and return the result."""
        import ray

        created = create(job)
        control.show("on the Ray cluster")
        try:
            ref = ray.remote(train).options(max_retries=RETRIES, **self.needs).remote(
                job.run.run_id, job.spec.model_dump(mode="json"), source, list(job.sets), self.gpu, self.shared,
                os.environ.get(_THREADS),
            )  # fmt: skip
            while not ray.wait([ref], timeout=_POLL_S)[0]:
                late = control.deadline is not None and time.monotonic() > control.deadline
                if late or control.stops_within(0):
                    ray.cancel(ref)  # SIGINT: the task ends the run and returns its files
                    if not ray.wait([ref], timeout=_STOP_S)[0]:
                        ray.cancel(ref, force=True)
                        raise ray.exceptions.TaskCancelledError
            files = ray.get(ref)
        except ray.exceptions.TaskCancelledError:
            return remote.record(created, job.spec, "interrupted", "interrupted, or the sweep's time budget ran out")
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, FtbenchError) else error) from None
        except ConnectionError as error:
            raise MissingError(f"lost the connection to Ray ({error}); run the same command again") from None
        except ray.exceptions.RayError as error:
            reason = f"Ray lost the task {RETRIES + 1} times: {_reason(error)}"
            return remote.record(created, job.spec, "error", reason, self.gpu)
        with rundir.writing(created.path):
            for name, content in files.items():
                path = created.path / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            created.reserve.unlink(missing_ok=True)
        return remote.finished(created)


def train(
    name: str, values: dict[str, Any], source: bytes, sets: list[str], gpu: str | None, shared: bool,
    threads: str | None,
) -> dict[str, bytes]:  # fmt: skip
    """Train on this node, and return the run's files as {path: content}. The last file is state.json."""
    os.environ.pop(_THREADS, None)  # Ray sets it to 1; `threads` is the user's setting
    os.environ |= {} if threads is None else {_THREADS: threads}
    request = RunRequest(Experiment.model_validate(values), source, sets)
    with tempfile.TemporaryDirectory(prefix="ftbench-") as folder:
        result = remote.train(Path(folder) / name, request, gpu, shared)
        paths = sorted(result.run.path.rglob("*"), key=lambda path: path == result.run.state)
        return {str(path.relative_to(result.run.path)): path.read_bytes() for path in paths if path.is_file()}
