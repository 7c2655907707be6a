"""Runs that were measured, beside what the estimator says of them at the shapes that they really had."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftbench.core.hardware import find_gpu
from ftbench.core.rows import StepRow
from ftbench.errors import SpecError
from ftbench.estimate.memory.constants import Constants
from ftbench.estimate.memory.estimate import MemoryEstimate, estimate_memory
from ftbench.estimate.recorded import is_outdated, recorded
from ftbench.estimate.workload.largest import BatchShape, Generation, Largest
from ftbench.estimate.workload.method import recipe_of
from ftbench.estimate.workload.model import is_rough, shape_of
from ftbench.families.vision import ImageSize
from ftbench.spec.experiment import Experiment
from ftbench.store.ranks import read_ranks
from ftbench.store.rundir import RunDir, find_runs, first_gpu, read_json
from ftbench.store.steps import read_steps

TIERS = ("allocated", "reserved", "device")


@dataclass(frozen=True, slots=True)
class Measured:
    """A run that ended well, or that ran out of memory (`fits` is then False and its peaks say nothing). Peaks in GiB;
    a device peak below the pool was sampled too late and is None. An `outdated` one confirms nothing of today's way."""

    name: str
    spec: Experiment
    gpu: str
    total: float
    fits: bool
    allocated: float | None
    reserved: float | None
    device: float | None
    batch: Largest | None
    outdated: bool = False

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
    """Return one run; None where it says nothing of the memory that today's code takes, its model's configuration is
    not here, no formula knows what it asks for, or as good as none (`is_rough`), or others had a part of its GPU."""
    summary = read_json(run.summary)
    state, gpu = summary.get("state"), first_gpu(read_json(run.machine))
    if state not in ("ok", "oom") or not gpu.get("memory_gb"):
        return None
    if (spec := recorded(run)) is None or is_rough(spec):
        return None
    try:
        recipe_of(spec, shape_of(spec.model))
    except SpecError:
        return None
    ended_well, memory = state == "ok", summary.get("memory_gb", {}) if state == "ok" else {}
    reserved, device = memory.get("reserved_peak"), memory.get("device_peak")
    late = device is None or reserved is None or device < reserved
    return Measured(
        name=run.path.name,
        spec=spec,
        gpu=gpu["name"],
        total=gpu["memory_gb"],
        fits=ended_well,
        allocated=memory.get("allocated_peak"),
        reserved=reserved,
        device=None if late else device,
        batch=realised(run, spec) if ended_well else None,
        outdated=is_outdated(run, spec),
    )


def realised(run: RunDir, spec: Experiment) -> Largest | None:
    """Return the largest batch that a run really had on one GPU, from its steps: positions computed in one forward
    pass. None where the steps do not say. Of a step of several padded passes the steps tell the sum, and the longest
    sequence, to which one of them was padded."""
    tables = read_ranks(run)[0] or [read_steps(run.steps)[0]]
    rows = [row for table in tables for row in table if row.padded_tokens and row.longest_sequence]
    if not rows:
        return None
    if spec.objective.prompts:
        return _realised_completions(spec, rows)
    passes = spec.train.gradient_accumulation_steps
    on = spec.optimizations
    flat = on.packing or on.padding_free
    uneven = passes > 1 and not flat
    row = max(rows, key=lambda row: ((row.longest_sequence or 0) * uneven, row.padded_tokens or 0))
    positions, longest = -(-(row.padded_tokens or 0) // passes), row.longest_sequence or 1
    if uneven:
        positions = longest * -(-(row.samples or 1) // passes)
    labels = -(-(row.label_tokens or 0) // passes)
    count = 1 if flat else max(1, round(positions / longest))
    images = ImageSize(*(-(-(each or 0) // passes) for each in (row.image_tokens, row.tiles, row.image_patches)))
    batch = BatchShape(count, -(-positions // count), labels, images)
    several = flat and (row.samples or 1) > 1
    padded = several or any((row.padded_tokens or 0) > (row.real_tokens or 0) for row in rows)
    most = spec.dataset.max_length
    whole = all(row.real_tokens == row.padded_tokens == (row.samples or 0) * most for row in rows)
    filled = flat and on.fixed_shape and all((row.samples or 0) <= passes * spec.train.batch_size for row in rows)
    return Largest(batch, batch, padded, whole or filled, "as the run had it")


def _realised_completions(spec: Experiment, rows: Sequence[StepRow]) -> Largest:
    """Return the widest step of completions. How much of its width was prompt the means tell."""
    row = max(rows, key=lambda row: row.padded_tokens or 0)
    count, made, real = row.samples or spec.global_batch, row.label_tokens or 0, row.real_tokens or 0
    width = -(-(row.padded_tokens or 0) // count)
    tokens = max(-(-made // count), width - (real - made) // count)
    padded = any((row.padded_tokens or 0) > (row.real_tokens or 0) for row in rows)
    size = spec.train.batch_size
    batch = BatchShape(size, width, size * tokens, generation=Generation(count, width - tokens, tokens))
    return Largest(batch, batch, padded, not padded, "as the run had it")
