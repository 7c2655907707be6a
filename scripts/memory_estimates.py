#!/usr/bin/env python3
"""Compare the memory estimate with committed runs: scripts/memory_estimates.py [--fit]

It writes docs/evidence/memory-estimates.md. --fit first fits the shipped constants (facts/estimator.yaml) to the runs
that are not held out.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from ftbench.core.hardware import find_gpu  # noqa: E402
from ftbench.core.units import change, optimizations_on, percent  # noqa: E402
from ftbench.errors import SpecError  # noqa: E402
from ftbench.estimate.memory.estimate import (  # noqa: E402
    FITTED,
    UNSEEN_SPREAD,
    Constants,
    MemoryEstimate,
    SlackBasis,
    case_of,
    constants,
    estimate_memory,
    slack_basis,
)
from ftbench.estimate.memory.phases import phases  # noqa: E402
from ftbench.estimate.time.history import recorded_spec  # noqa: E402
from ftbench.estimate.workload.largest import BatchShape, Largest  # noqa: E402
from ftbench.estimate.workload.model import is_rough, shape_of  # noqa: E402
from ftbench.estimate.workload.plan import plan_of  # noqa: E402
from ftbench.facts import read_facts  # noqa: E402
from ftbench.families.vision import ImageSize  # noqa: E402
from ftbench.spec import identity  # noqa: E402
from ftbench.spec.experiment import Experiment, Measure, Train  # noqa: E402
from ftbench.store.ranks import read_ranks  # noqa: E402
from ftbench.store.rundir import RunDir, find_runs, first_gpu, read_json  # noqa: E402
from ftbench.store.steps import read_steps  # noqa: E402

RUNS = sorted({*(ROOT / "results/h200").glob("*/")} - {*(ROOT / "results/h200").glob("founding-*/")})
FACTS = ROOT / "src/ftbench/facts/estimator.yaml"
PAGE = ROOT / "docs/evidence/memory-estimates.md"
OFFLOADED = "2026-11-28T17:10"  # runs before this time kept the memory of offloaded inputs for too long
PROFILED = "qwen3-8b-lora-b4-2386542fdb42-r1"

HEAD = """schema: 1
# Constants without a formula, fitted by `scripts/memory_estimates.py --fit` to committed runs that are not held out.
# Their errors are in docs/evidence/memory-estimates.md, their meaning in estimate/memory/estimate.py.
"""

TIERS = ("allocated", "reserved", "device")
# Constant of the pool's unused part → other terms. The constant is fitted to runs without these terms.
EXCLUDED = {"logits_share": ("compiled_share", "varying_share", "optimizer_share"),
            "compiled_share": ("varying_share",), "varying_share": ("compiled_share",),
            "optimizer_share": ("varying_share",)}  # fmt: skip
AGREES = 0.03  # largest error of a strategy whose runs confirm the estimate
LEVEL = 0.9  # share of the fitted runs that the ranges contain
FEWEST = 3  # a constant that fewer runs show keeps its shipped value


@dataclass(frozen=True, slots=True)
class Measured:
    """A run that succeeded, or that ran out of memory (`fits` is False).

    Peaks are in GiB. If a device peak is below the reserved peak, it was sampled too late and is None here."""

    name: str
    spec: Experiment
    gpu: str
    total: float
    fits: bool
    allocated: float | None
    reserved: float | None
    device: float | None
    batch: Largest | None

    def estimate(self, known: Constants | None = None) -> MemoryEstimate:
        gpu = find_gpu(self.gpu) or self.total
        return estimate_memory(self.spec, gpu, total=self.total, batch=self.batch, known=known)


class Error(NamedTuple):
    """The relative errors of one kind of memory (tier) over several runs: mean and largest absolute error, and signed
    mean."""

    count: int
    mean: float
    worst: float
    bias: float


@dataclass(frozen=True, slots=True)
class RunErrors:
    """A run with its estimate. `errors` are estimated / measured - 1 by tier."""

    run: Measured
    estimate: MemoryEstimate
    errors: dict[str, float]


def read(paths: Iterable[Path]) -> list[Measured]:
    """Return the runs below these folders whose memory can be compared, the oldest first."""
    found = {run.path: (read_json(run.state)["started_at"], run.path) for path in paths for run in find_runs(path)}
    return [run for path in sorted(found, key=found.get) if (run := measured(RunDir(path))) is not None]


def measured(run: RunDir) -> Measured | None:
    """Return one run, or None for a run without a GPU, a failed run, an unknown model, or a rough estimate."""
    summary = read_json(run.summary)
    state, gpu = summary.get("state"), first_gpu(read_json(run.machine))
    if state not in ("ok", "oom") or not gpu.get("memory_gb"):
        return None
    if (spec := recorded_spec(run)) is None or is_rough(spec):
        return None
    try:
        plan_of(spec, shape_of(spec.model))
    except SpecError:
        return None
    succeeded, memory = state == "ok", summary.get("memory_gb", {}) if state == "ok" else {}
    reserved, device = memory.get("reserved_peak"), memory.get("device_peak")
    if spec.optimizations.gradient_checkpointing == "offload" and read_json(run.state)["started_at"] < OFFLOADED:
        reserved = device = None
    late = device is None or reserved is None or device < reserved
    return Measured(
        run.path.name, spec, gpu["name"], gpu["memory_gb"], succeeded, memory.get("allocated_peak"), reserved,
        None if late else device, largest_batch_of(run, spec) if succeeded else None,
    )  # fmt: skip


def largest_batch_of(run: RunDir, spec: Experiment) -> Largest | None:
    """Return the largest micro-batch of a run on one GPU, or None if its steps do not record it.

    For a step of several padded passes, steps.csv has the sum over the passes (and over the GPUs, if the files of the
    ranks are missing) and the longest sequence."""
    ranks = read_ranks(run)[0]
    tables = ranks or [read_steps(run.steps)[0]]
    rows = [row for table in tables for row in table if row.padded_tokens and row.longest_sequence]
    if not rows:
        return None
    passes = spec.train.gradient_accumulation_steps * (1 if ranks else spec.launch.data_parallel_size)
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
    known = spec.dataset.has_images and len(tables) == passes == 1  # else each step has several batches
    records = tuple(sorted({*accumulate((row.padded_tokens or 0 for row in rows), max)})) if known else ()
    return Largest(batch, batch, padded, whole or filled, "as the run had it", records=records)


def rows(runs: Sequence[Measured], known: Constants) -> list[RunErrors]:
    """Return the runs that succeeded, each with its estimate under these constants."""
    return [_row(run, run.estimate(known)) for run in runs if run.fits and run.allocated is not None]


def _row(run: Measured, estimate: MemoryEstimate) -> RunErrors:
    pairs = {tier: (getattr(run, tier), getattr(estimate, tier).expected) for tier in TIERS}
    return RunErrors(run, estimate, {tier: estimated / real - 1 for tier, (real, estimated) in pairs.items() if real})


def is_inside(row: RunErrors, tier: str) -> bool:
    """Return whether a measured peak is within the estimated range of its tier."""
    band = getattr(row.estimate, tier)
    return bool(band.low <= getattr(row.run, tier) <= band.high)


def error(estimated: Sequence[RunErrors], tier: str) -> Error | None:
    """Return the error of one tier, or None if no run measured it."""
    errors = [row.errors[tier] for row in estimated if tier in row.errors]
    sizes = [abs(value) for value in errors]
    return Error(len(errors), sum(sizes) / len(sizes), max(sizes), sum(errors) / len(errors)) if errors else None


def false_fits(runs: Sequence[Measured], known: Constants) -> list[str]:
    """Return the runs that ran out of memory although the estimate says that they fit."""
    return [run.name for run in runs if not run.fits and run.estimate(known).verdict == "fits"]


def fit(runs: Sequence[Measured]) -> Constants:
    """Return the constants, fitted to runs on one GPU. A constant that no run shows keeps its shipped value.

    The unused part of the pool is explained in the order of EXCLUDED."""
    ended = [run for run in runs if run.fits and run.allocated is not None and run.spec.launch.gpus == 1]
    plain = replace(constants(), allocated_factor=1.0)
    factors = [run.allocated / run.estimate(plain).allocated.expected for run in ended if run.allocated]
    context = [run.device - run.reserved for run in ended if run.device is not None and run.reserved is not None]
    slack = [(slack_basis(case, phases(case)), run.reserved - run.allocated) for run in ended
             if run.reserved is not None and run.allocated is not None and not run.spec.optimizations.weight_offload
             and (case := case_of(run.spec, find_gpu(run.gpu) or run.total, run.batch)[0])]  # fmt: skip
    values: dict[str, Any] = {"allocated_factor": median(factors), **_slack(slack)}
    if len(context) >= FEWEST:
        values["context_gib"] = median(context)
    fitted = replace(constants(), runs=tuple(sorted({run.name for run in ended})), **values)
    fitted = replace(fitted, strategies=_confirmed(runs, fitted))
    seen = [abs(row.errors["allocated"]) for row in rows(ended, fitted)
            if row.estimate.allocated.high < row.estimate.allocated.expected * (1 + UNSEEN_SPREAD) - 1e-9]  # fmt: skip
    fitted = replace(fitted, allocated_range=quantile(seen))
    return replace(fitted, pool_range=quantile([_needed(row, fitted) for row in rows(ended, fitted)]))


def _needed(row: RunErrors, fitted: Constants) -> float:
    """Return the smallest `pool_range` whose range of reserved memory holds the run."""
    allocated, reserved = row.estimate.allocated, row.estimate.reserved
    got = row.run.reserved or reserved.expected
    held, above = reserved.expected - allocated.expected, reserved.high - reserved.expected
    beyond = (above - (allocated.high - allocated.expected)) / fitted.pool_range
    high = (got - reserved.expected - (allocated.high - allocated.expected)) / max(beyond, 1e-9)
    low = (reserved.expected - got - (allocated.expected - allocated.low)) / max(held, 1e-9)
    return min(1.0, max(0.0, high, low))


def quantile(values: Sequence[float], level: float = LEVEL) -> float:
    """Return the value that a new value does not exceed with this probability (split conformal prediction)."""
    ordered = sorted(values)
    return ordered[min(len(ordered), math.ceil((len(ordered) + 1) * level)) - 1]


def _confirmed(runs: Sequence[Measured], fitted: Constants) -> tuple[str, ...]:
    """Return the strategies whose runs on several GPUs are all within AGREES of the estimate."""
    several = [row for row in rows(runs, fitted) if row.run.spec.launch.gpus > 1]
    strategies = {row.run.spec.launch.strategy for row in several}
    missed = {row.run.spec.launch.strategy for row in several if abs(row.errors["allocated"]) > AGREES}
    return tuple(sorted(strategies - missed))


def _slack(slack: Sequence[tuple[SlackBasis, float]]) -> dict[str, float]:
    """Return each share of the unused part of the pool: unused GiB / GiB of its tensors, summed over the runs.

    Logits are small, and some of these runs have unused blocks for other reasons. So their share is the median."""
    fitted: dict[str, float] = {}
    for name, others in EXCLUDED.items():
        seen = [(max(0.0, size - fitted.get("logits_share", 0.0) * basis["logits_share"]), basis[name])
                for basis, size in slack if basis[name] and not any(basis[other] for other in others)]  # fmt: skip
        sizes, parts = zip(*seen, strict=True) if len(seen) >= FEWEST else ([getattr(constants(), name)], [1])
        typical = median(size / part for size, part in zip(sizes, parts, strict=True))
        fitted[name] = typical if name == "logits_share" else sum(sizes) / sum(parts)
    return fitted


def held_out(run: Measured) -> bool:
    """Return whether a run is held out of the fit. All runs with images are, because there are too few."""
    return run.spec.dataset.has_images or is_held_out(run.spec, run.gpu)


def is_held_out(spec: Experiment, gpu: str | None) -> bool:
    """Return whether a spec belongs to the held-out third, chosen by its hash. Specs with the same step share it."""
    keep = {"batch_size", "gradient_accumulation_steps", "optimizer", "precision"}
    alike = spec.model_copy(update={
        "train": Train.model_validate(spec.train.model_dump(include=keep)),
        "dataset": spec.dataset.model_copy(update={"samples": None, "eval_samples": 0, "seed": 42}),
        "measure": Measure(),
    })  # fmt: skip
    return int(identity.fingerprint(alike, gpu), 16) % 3 == 0


def once(runs: Iterable[Measured]) -> list[Measured]:
    """Return the last run of each experiment on each GPU, without repeats."""
    return list({identity.fingerprint(run.spec, run.gpu): run for run in runs}.values())


def write_constants(found: Constants) -> None:
    lines = [f"{name}: {getattr(found, name):.4g}" for name in FITTED]
    runs = "\n".join(f"- {name}" for name in found.runs)
    strategies = "".join(f"- {name}\n" for name in found.strategies)
    several = f"strategies:\n{strategies}" if strategies else ""
    FACTS.write_text(f"{HEAD}{chr(10).join(lines)}\nruns:\n{runs}\n{several}", "utf-8")
    read_facts.cache_clear()
    constants.cache_clear()


def table(found: Sequence[RunErrors]) -> str:
    lines = ["| run | model | method | batch | optimizations | allocated GiB | error | reserved error | device error |",
             "|---|---|---|---|---|--:|--:|--:|--:|"]  # fmt: skip
    for row in found:
        spec, batch = row.run.spec, row.run.batch
        on = ", ".join(optimizations_on(spec.optimizations.model_dump(mode="json")))
        shape = f"{batch.expected.rows} x {batch.expected.length}" if batch else ""
        errors = " | ".join(change(row.errors.get(tier)) for tier in TIERS)
        settings = f"{spec.model.id} | {spec.method.name} | {shape} | {on}"
        lines.append(f"| {row.run.name} | {settings} | {row.run.allocated:.2f} | {errors} |")
    return "\n".join(lines)


def error_lines(name: str, found: Sequence[RunErrors]) -> list[str]:
    lines = []
    for tier in TIERS:
        if (off := error(found, tier)) is not None:
            inside = sum(is_inside(row, tier) for row in found if tier in row.errors) / off.count
            cells = percent(off.mean, 2), percent(off.worst, 2), change(off.bias, 2), percent(inside)
            lines.append(f"| {name} | {tier} | {off.count} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true")
    asked = parser.parse_args()
    runs = once(read(RUNS))
    fitted, held = ([run for run in runs if held_out(run) == held] for held in (False, True))
    if asked.fit:
        write_constants(fit(fitted))
    known = constants()
    own, rest = rows(fitted, known), rows(held, known)
    ended = [run for run in runs if not run.fits]
    verdicts = [f"| {run.name} | {run.estimate(known).verdict} |" for run in ended]
    wrong, measured_strategies = false_fits(runs, known), ", ".join(known.strategies) or "none"
    page = f"""# Errors of memory estimates

`scripts/memory_estimates.py` writes this page from the committed runs in `results/h200`, without the [text
study](founding-text.md) and the [image study](founding-images.md). Each estimate uses the batch shape that the run
really had. The constants of `src/ftbench/facts/estimator.yaml` were fitted to the runs marked "fitted", and not to
"held out" runs. One third of the experiments (chosen by a hash of the settings) and all runs with images are "held
out". The terms that were not fitted count the tensors that autograd saves or, with compiled layers, the tensors that
AOTAutograd's partitioner saves. The terms of unsloth and Liger come from the source code of these libraries and were
checked with the runs on this page. The checkpointing of unsloth needs up to 0.6 GiB (2 to 6 %) more than its source
code explains. The runs in `results/h200/grid` (`scripts/studies/grid`) were estimated before the runs were made. Four
terms were corrected after a comparison with fitted runs: 8-bit optimizer states of embeddings, activations in host
memory, the logits of small batches (`results/h200/launch-bound`), and the gradients of a trained LM head.

An older run with `chunked_loss`, {PROFILED}, kept the gradient of one chunk together with the logits of the next chunk
(0.58 GiB with 2,048 tokens of Qwen3). The estimate of this run is too low by 0.58 GiB. Older runs with
`gradient_checkpointing: offload` kept free memory for too long, so this page compares only their allocated memory.

The ranges of the estimates were fitted to contain 90 % of the fitted runs. The last column of the table shows the share
of runs whose measured memory is inside the range. The bias is the mean of the signed errors: a positive bias means that
the estimates are too high on average.

| runs | kind of memory | number | mean error | worst error | bias | inside the range |
|---|---|--:|--:|--:|--:|--:|
{chr(10).join(error_lines("fitted", own) + error_lines("held out", rest))}

Some model families in `src/ftbench/families` do not have a committed run. The estimates of these families were compared
with recorded memory peaks of small models. The allocated memory agrees within 2 %
(`tests/estimate/test_recorded_peaks.py`), and the range of these families is ±{percent(UNSEEN_SPREAD)}. Strategies
without measured runs (all except {measured_strategies}) have a range of ±15 %. This page excludes runs of other
frameworks (`launch.framework`) and runs on shared GPUs (`measure.share_gpu`). Device memory is the value that the
driver reports (NVML, nvidia-smi). Device memory includes about 0.6 GiB that the driver itself needs. The verdict *fits*
compares the estimated device memory with the memory that cudaMemGetInfo reports for a process (`facts/gpus.yaml`:
probed or published). On cards with display outputs, ftbench subtracts 0.5 GiB for a screen from this memory.

Estimates of reserved memory are least accurate for very small models and for batches of varying length. For such models
and batches, the allocator's pool depends on the order of the requested sizes. Therefore the range of reserved memory
includes three extra amounts: free blocks that are too small to be reused at the peak (`_not_reused` in
estimate/memory/estimate.py), the minimum size of the allocator's segments, and kernels that are loaded late.

The runs in this table ran out of memory, so a correct estimate is *does not fit* or *uncertain*. {len(wrong)} of these
runs were estimated as *fits*:

| run | verdict |
|---|---|
{chr(10).join(verdicts)}

## Held out

{table(rest)}

## Fitted

{table(own)}
"""
    PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
