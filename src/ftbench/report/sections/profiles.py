"""Sections on profiled runs: kernels by group, the longest kernels, memory by purpose."""

from collections.abc import Sequence
from typing import Any

from ftbench.core import units
from ftbench.core.allocations import CATEGORIES
from ftbench.profile.files import KERNELS
from ftbench.profile.groups import GROUPS, short
from ftbench.report.data.cells import Cell, Run
from ftbench.report.document import Section
from ftbench.report.sections.rows import Record, field, first_of, names_of, section
from ftbench.store.rundir import MEMORY, read_json

_MOST_KERNELS = 10
_NOTE = (
    "Milliseconds per step. Profiling slows launches, so busy is the GPU time of the profiled steps divided by the "
    "duration of the steps just before. Without a GPU it is the operator time divided by that of the profiled steps."
)


def groups(cells: Sequence[Cell]) -> Section | None:
    """Return milliseconds per step by kernel group, one row per profile."""
    records = [names_of(cell) | part for cell in cells if (part := first_of(cell, _groups))]
    columns = {
        "step, profiled": field("step_ms", _ms), "step": field("step_before_ms", _ms),
        "busy": field("busy_share", units.percent), "idle": field("idle_ms", _ms),
    }  # fmt: skip
    shown = [group for group in GROUPS if any(record["groups_ms"].get(group) for record in records)]
    columns |= {group: field("groups_ms", _ms, group) for group in shown}
    return section("kernel_groups", "Where the time of a step goes", records, columns, (_NOTE,))


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _groups(run: Run) -> Record | None:
    document = _document(run, KERNELS)
    if not (steps := document.get("steps")):
        return None
    busy = document["busy_share_unprofiled"]
    return {
        "step_ms": document["window_ms"] / steps, "step_before_ms": document["step_ms"]["before"],
        "busy_share": document["busy_share"] if busy is None else busy, "idle_ms": document["idle"]["ms"] / steps,
        "groups_ms": {group["group"]: group["time_ms"] / steps for group in document["groups"]},
    }  # fmt: skip


def _document(run: Run, name: str) -> dict[str, Any]:
    return read_json(run.dir.profile / name)


def memory(cells: Sequence[Cell]) -> Section | None:
    """Return GiB at the memory peak of a step by purpose, one row per profile."""
    records = [names_of(cell) | part for cell in cells if (part := first_of(cell, _peak))]
    kinds = [kind for kind in CATEGORIES if any(record["peak"][kind] for record in records)]
    columns = {"GiB": field("peak", units.gibibytes, "total_gb"), "in": field("peak", str, "phase")}
    columns |= {kind: field("peak", units.gibibytes, kind) for kind in kinds}
    words = ("GiB of tensors at the memory peak of one step. Activations are kept for the backward pass.",)
    return section("memory_by_category", "What memory is for", records, columns, words, text=("in",))


def _peak(run: Run) -> Record | None:
    peak = _document(run, MEMORY).get("peak")
    return {"peak": {name: peak[name] for name in ("phase", "total_gb", *CATEGORIES)}} if peak else None


def kernels(cells: Sequence[Cell]) -> Section | None:
    """Return the kernels with the longest total time."""
    records = [names_of(cell) | kernel for cell in cells for kernel in first_of(cell, _kernels) or []]
    columns = {
        "trained by": field("trained_by"), "batch": field("batch"), "kernel": field("kernel", short),
        "group": field("group", _known), "ms": field("time_ms", _ms), "share": field("share", units.percent),
        "calls": field("calls", _known),
    }  # fmt: skip
    text = ("trained by", "kernel", "group")
    return section("kernels", "Where the time goes", records, columns, named=False, text=text)


def _known(value: Any) -> str:
    return str(value or "")


def _kernels(run: Run) -> list[Record]:
    listed = sorted(_document(run, KERNELS).get("kernels", []), key=lambda kernel: -kernel["time_ms"])
    total = sum(kernel["time_ms"] for kernel in listed)
    return [
        {"kernel": kernel["name"], "group": kernel.get("group"), "time_ms": kernel["time_ms"],
         "calls": kernel.get("calls"), "share": kernel["time_ms"] / total if total else None}
        for kernel in listed[:_MOST_KERNELS]
    ]  # fmt: skip
