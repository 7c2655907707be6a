"""An estimate for people: the three tiers, the parts at the peak as bars, the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ftbench.core.units import gibibytes
from ftbench.estimate.memory.estimate import Band, MemoryEstimate
from ftbench.spec.experiment import Experiment

WIDTH = 32  # characters of the longest bar


def as_text(spec: Experiment, found: Sequence[tuple[str, MemoryEstimate, int | None]]) -> str:
    """The card of one GPU, or a line a GPU. `found` is the GPU's name, its estimate and the largest batch that fits."""
    if len(found) == 1:
        return _card(spec, *found[0])
    lines = [f"{'GPU':<36} {'has':>7} {'device memory':>24}  {'verdict':<13} largest batch"]
    for name, one, largest in found:
        band = f"{gibibytes(one.device.low)} to {gibibytes(one.device.high)} GiB"
        most = f"{largest}{_all(spec, largest)}" if largest else "none"
        lines.append(f"{name:<36} {gibibytes(one.total):>7} {band:>24}  {one.verdict:<13} {most}")
    return "\n".join(lines)


def _card(spec: Experiment, name: str, found: MemoryEstimate, largest: int | None) -> str:
    rows, length = found.batch
    lines = [
        f"{spec.model.id}, {spec.method.name}, batch {spec.train.batch_size}",
        f"largest batch: {rows} x {length:,} positions ({found.basis})",
        "",
        f"{'GiB':<18} {'low':>8} {'expected':>9} {'high':>8}",
        _tier("allocated", found.allocated),
        _tier("reserved", found.reserved),
        _tier("device", found.device),
        "",
        f"peak: {found.peak_phase}, most of it {found.peak_term}",
        *bars(found.parts),
        "",
        f"{name} has {gibibytes(found.total)} GiB: {found.verdict}",
        f"largest batch that fits: {largest}{_all(spec, largest)}" if largest else "no batch is sure to fit",
    ]
    return "\n".join(lines)


def _all(spec: Experiment, largest: int) -> str:
    return " (all samples)" if largest == spec.dataset.samples else ""


def _tier(name: str, band: Band) -> str:
    return f"{name:<18} {gibibytes(band.low):>8} {gibibytes(band.expected):>9} {gibibytes(band.high):>8}"


def bars(parts: Mapping[str, float]) -> list[str]:
    """A line a part, the largest first, GiB."""
    longest = max(parts.values(), default=1.0)
    shown = [(name, size) for name, size in sorted(parts.items(), key=lambda pair: -pair[1]) if size >= 0.0005]
    return [f"  {name:<16} {gibibytes(size):>8}  {'█' * max(1, round(WIDTH * size / longest))}" for name, size in shown]


def as_document(spec: Experiment, found: Sequence[tuple[str, MemoryEstimate, int | None]]) -> dict[str, Any]:
    """For --json: sizes in GiB."""
    return {
        "schema": 1,
        "model": spec.model.id,
        "method": spec.method.name,
        "batch_size": spec.train.batch_size,
        "gpus": [{"gpu": name, **asdict(one), "largest_batch": largest} for name, one, largest in found],
    }
