"""Runs that were measured, beside what the estimator says of them at the shapes that they really had."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftbench.core.hardware import find_gpu
from ftbench.errors import FtbenchError, SpecError
from ftbench.estimate.memory.constants import Constants
from ftbench.estimate.memory.estimate import MemoryEstimate, estimate_memory
from ftbench.estimate.time.history import is_older
from ftbench.estimate.workload import batches
from ftbench.estimate.workload.batches import BatchShape
from ftbench.estimate.workload.model import check_modelled, shape_of
from ftbench.spec import identity
from ftbench.spec.experiment import Experiment, Measure, Train
from ftbench.store import rundir
from ftbench.store.rundir import RunDir, find_runs, first_gpu
from ftbench.store.steps import read_steps

TIERS = ("allocated", "reserved", "device")


@dataclass(frozen=True, slots=True)
class Measured:
    """A run that ended well, or that ran out of memory (`fits` is then False and its peaks say nothing). Peaks in GiB;
    a device peak below the pool was sampled too late and is None."""

    name: str
    spec: Experiment
    gpu: str
    total: float
    fits: bool
    allocated: float | None
    reserved: float | None
    device: float | None
    batch: batches.Largest | None

    def estimate(self, known: Constants | None = None) -> MemoryEstimate:
        gpu = find_gpu(self.gpu) or self.total
        return estimate_memory(self.spec, gpu, total=self.total, batch=self.batch, known=known)


def read(paths: Iterable[Path]) -> list[Measured]:
    """Return the runs at or below some folders that say something of memory: on a GPU, no mock; in the order of
    their paths. Raises SpecError for a folder that is not there or holds no such run."""
    paths = list(paths)
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise SpecError(f"{', '.join(missing)}: no such folder")
    directories = {run.path for path in paths for run in find_runs(path)}
    runs = [run for path in sorted(directories) if (run := measured(RunDir(path))) is not None]
    if not runs:
        raise SpecError(f"{', '.join(map(str, paths))}: holds no run on a GPU that says how much memory it took")
    return runs


def measured(run: RunDir) -> Measured | None:
    """Return one run; None where it says nothing of memory, or of that of other code than today's
    (`history.is_older`), where no formula describes its step, or its model's configuration is not on this machine."""
    try:
        spec = spec_of(run)
        check_modelled(spec)
        shape_of(spec.model)
        summary, described = rundir.read_json(run.summary), rundir.read_json(run.machine)
    except (FtbenchError, OSError, ValueError):
        return None
    gpu, state = first_gpu(described), summary.get("state")
    if is_older(run) or spec.launch.mock != "off" or not gpu.get("memory_gb") or state not in ("ok", "oom"):
        return None
    memory = summary.get("memory_gb") or {}
    reserved, device = memory.get("reserved_peak"), memory.get("device_peak")
    late = device is None or reserved is None or device < reserved
    ok = state == "ok"
    return Measured(
        name=run.path.name,
        spec=spec,
        gpu=gpu["name"],
        total=gpu["memory_gb"],
        fits=ok,
        allocated=memory.get("allocated_peak") if ok else None,
        reserved=reserved if ok else None,
        device=None if late or not ok or spec.measure.share_gpu else device,
        batch=realised(run, spec) if ok else None,
    )


def spec_of(run: RunDir) -> Experiment:
    """Return the resolved spec of a run."""
    values = rundir.read_json(run.spec_json)
    return Experiment.model_validate({key: value for key, value in values.items() if key not in ("schema", "set")})


def realised(run: RunDir, spec: Experiment) -> batches.Largest | None:
    """Return the largest batch that a run really had, from its steps: positions computed in one forward pass. None
    where the steps do not say."""
    rows = [row for row in read_steps(run.steps)[0] if row.padded_tokens and row.longest_sequence]
    if not rows:
        return None
    passes = spec.train.gradient_accumulation_steps
    row = max(rows, key=lambda row: row.padded_tokens or 0)
    positions, longest = -(-(row.padded_tokens or 0) // passes), row.longest_sequence or 1
    flat = spec.optimizations.packing or spec.optimizations.padding_free
    labels = -(-(row.label_tokens or 0) // passes)
    count = 1 if flat else max(1, round(positions / longest))
    batch = BatchShape(count, -(-positions // count), labels)
    several = flat and (row.samples or 1) > 1
    padded = several or any((row.padded_tokens or 0) > (row.real_tokens or 0) for row in rows)
    most = spec.dataset.max_length
    whole = all(row.real_tokens == row.padded_tokens == (row.samples or 0) * most for row in rows)
    return batches.Largest(batch, batch, padded, whole, "as the run had it")


def facts(run: Measured) -> dict[str, Any]:
    """Return what tells one run from another in a table."""
    on = run.spec.optimizations.model_dump(mode="json")
    named = [
        name if value is True else f"{name} {value}"
        for name, value in on.items()
        if value not in (False, "off", "auto")
    ]
    return {
        "model": run.spec.model.id,
        "method": run.spec.method.name,
        "batch": run.spec.train.batch_size,
        "length": run.batch.expected.length if run.batch else None,
        "optimizations": ", ".join(named),
    }


def held_out(run: Measured) -> bool:
    """Return whether a run is never fitted to."""
    return is_held_out(run.spec, run.gpu)


def is_held_out(spec: Experiment, gpu: str | None) -> bool:
    """Return whether a spec belongs to the third of all experiments that is held out, by their hash, which nobody
    chooses; those with the same step are on one side."""
    keep = {"batch_size", "gradient_accumulation_steps", "optimizer", "precision"}
    alike = spec.model_copy(update={
        "train": Train.model_validate(spec.train.model_dump(include=keep)),
        "dataset": spec.dataset.model_copy(update={"samples": None, "eval_samples": 0, "seed": 42}),
        "measure": Measure(),
    })  # fmt: skip
    return int(identity.fingerprint(alike, gpu), 16) % 3 == 0


def once(runs: Iterable[Measured]) -> list[Measured]:
    """Return the first run of each experiment on each GPU: repeats of a run are no further rows."""
    return list({identity.fingerprint(run.spec, run.gpu): run for run in reversed(list(runs))}.values())[::-1]
