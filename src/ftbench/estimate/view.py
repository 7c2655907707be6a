"""An estimate for people: the three tiers, the parts at the peak as bars, the verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from typing import Any

from ftbench.core.table import folded, text_table
from ftbench.core.units import gibibytes
from ftbench.estimate.memory.estimate import HOST, MemoryEstimate
from ftbench.estimate.workload.sharding import shared_how
from ftbench.spec.experiment import Experiment, Launch

WIDTH = 32  # characters of the longest bar


def as_text(spec: Experiment, rows: Sequence[tuple[str, MemoryEstimate, int | None]]) -> str:
    """Return the card of one GPU, or a line a GPU; a row is its name, its estimate and the largest batch that fits."""
    if len(rows) == 1:
        return _card(spec, *rows[0])
    columns = ["GPU", "verdict", ">largest batch", ">device memory", ">for a process"]
    table = text_table(columns, [
        (name, memory.verdict, _largest(spec, largest) or "none",
         f"{gibibytes(memory.device.low)} to {gibibytes(memory.device.high)} GiB",
         gibibytes(memory.usable - memory.margin))
        for name, memory, largest in rows
    ])  # fmt: skip
    margin = max(memory.margin for _, memory, _ in rows)
    kept = f", less a margin of {gibibytes(margin)} GiB on cards that may drive a display" if margin else ""
    return f"{table}\n" + folded(f"for a process: GiB that CUDA gives one, as probed or published{kept}")


def _card(spec: Experiment, name: str, memory: MemoryEstimate, largest: int | None) -> str:
    rows, length = memory.batch
    tiers = [(tier, *map(gibibytes, astuple(getattr(memory, tier)))) for tier in ("allocated", "reserved", "device")]
    most = _largest(spec, largest)
    lines = [
        f"{spec.model.id}, {spec.method.name}, batch {spec.train.batch_size}{_shared(spec.launch)}",
        folded(f"heaviest batch: {rows} x {length:,} positions ({memory.basis})"),
        "",
        text_table(["GiB", ">low", ">expected", ">high"], tiers),
        "",
        f"peak: {memory.peak_phase}, most of it {memory.peak_term}",
        bars(memory.parts),
        "",
        folded(f"{name} has {memory.capacity.words}: {memory.verdict}"),
        f"largest batch that fits: {most}" if most else "no batch is sure to fit",
        *([f"host memory: about {gibibytes(memory.host)} GiB"] if memory.host > HOST else []),
    ]
    return "\n".join(lines)


def _shared(launch: Launch) -> str:
    """Return how several GPUs share the work; nothing of one."""
    machines = f" of {launch.nodes} machines" if launch.nodes > 1 else ""
    return "" if launch.gpus == 1 else f" a GPU, on {launch.gpus} GPUs{machines} ({shared_how(launch)})"


def _largest(spec: Experiment, largest: int | None) -> str:
    every = largest and not spec.objective.prompts and largest == spec.dataset.samples
    return f"{largest} (all samples)" if every else str(largest or "")


def bars(parts: Mapping[str, float]) -> str:
    """Return a line a part, the largest first, GiB."""
    longest = max(parts.values(), default=1.0)
    return text_table(["", ">", ""], [
        (f"  {name}", gibibytes(size), "█" * max(1, round(WIDTH * size / longest)))
        for name, size in sorted(parts.items(), key=lambda pair: -pair[1]) if size >= 0.0005
    ])  # fmt: skip


def as_document(spec: Experiment, rows: Sequence[tuple[str, MemoryEstimate, int | None]]) -> dict[str, Any]:
    """Return the document for --json: sizes in GiB."""
    return {
        "schema": 1,
        "model": spec.model.id,
        "method": spec.method.name,
        "batch_size": spec.train.batch_size,
        "gpus": [{"gpu": name, **asdict(memory), "largest_batch": largest} for name, memory, largest in rows],
    }
