"""What profiled runs recorded: kernels by group, the kernels that take most, memory, pictures of a step. Files of
another form are passed over: these may be written by tools of several versions, and come out of a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftbench.core import units
from ftbench.core.allocations import CATEGORIES
from ftbench.profile import memory as held
from ftbench.profile import timeline
from ftbench.profile.files import KERNELS, TIMELINE
from ftbench.profile.groups import GROUPS
from ftbench.profile.names import short
from ftbench.report.data.groups import HEADINGS, Cell, Run, first_of, shown, who
from ftbench.report.render.document import Section, Table
from ftbench.report.sections.generations import read_document
from ftbench.store.rundir import MEMORY

_MOST_KERNELS = 10
_NOTE = (
    "Profiling slows launches, so busy is the GPU's time in the profiled steps over the steps just before them; "
    "without a GPU it is the operators' time over the profiled steps themselves."
)


def groups(cells: Sequence[Cell]) -> Section | None:
    """Return milliseconds a step by kernel group, a row a profile, with a picture of one step each."""
    records = [who(cell) | part for cell in cells if (part := first_of(cell, _groups)) is not None]
    if not records:
        return None
    present = [group for group in GROUPS if any(record["groups_ms"].get(group) for record in records)]
    rows = [
        [*shown(r), _ms(r["step_ms"]), _ms(r["step_before_ms"]), units.percent(r["busy_share"]), _ms(r["idle_ms"]),
         *(_ms(r["groups_ms"].get(group)) for group in present)]
        for r in records
    ]  # fmt: skip
    headings = [*HEADINGS, "step, profiled", "step", "busy", "idle", *present]
    pictures = [svg for cell in cells if (svg := first_of(cell, _picture)) is not None]
    words = ("Milliseconds a step. " + _NOTE,)
    title = "Where the time of a step goes"
    return Section("kernel_groups", title, Table({}, headings, rows, [], HEADINGS), words, records, pictures)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _groups(run: Run) -> dict[str, Any] | None:
    document = read_document(run.dir.profile / KERNELS)
    try:
        steps, busy = document["steps"], document["busy_share_unprofiled"]
        listed = {str(group["group"]): float(group["time_ms"]) / steps for group in document["groups"]}
        before = document["step_ms"]["before"]
        return {
            "step_ms": float(document["window_ms"]) / steps,
            "step_before_ms": None if before is None else float(before),
            "busy_share": float(document["busy_share"] if busy is None else busy),
            "idle_ms": float(document["idle"]["ms"]) / steps, "groups_ms": listed,
        }  # fmt: skip
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _picture(run: Run) -> str | None:
    picture = read_document(run.dir.profile / TIMELINE)
    try:
        return timeline.svg(picture, run.run_id)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def memory(cells: Sequence[Cell]) -> Section | None:
    """Return GiB at the highest moment of a step by what they are for, a row a profile, with a picture of the step
    each."""
    records = [who(cell) | part for cell in cells if (part := first_of(cell, _memory)) is not None]
    if not records:
        return None
    present = [kind for kind in CATEGORIES if any(record["peak"].get(kind) for record in records)]
    rows = [
        [*shown(r), units.gibibytes(r["peak"]["total_gb"]), str(r["peak"]["phase"]),
         *(units.gibibytes(r["peak"].get(kind)) for kind in present)]
        for r in records
    ]  # fmt: skip
    headings = [*HEADINGS, "GiB", "in", *present]
    pictures = [svg for cell in cells if (svg := first_of(cell, _held)) is not None]
    words = ("GiB of tensors at the highest moment of one step. Activations are kept for the backward pass.",)
    table = Table({}, headings, rows, [], (*HEADINGS, "in"))
    return Section("memory_by_category", "What memory is for", table, words, records, pictures)


def _memory(run: Run) -> dict[str, Any] | None:
    document = read_document(run.dir.profile / MEMORY)
    try:
        peak = document["peak"]
        kinds = {kind: float(peak[kind]) for kind in ("total_gb", *CATEGORIES)}
        return {"peak": {"phase": str(peak["phase"]), **kinds}}
    except (KeyError, TypeError, ValueError):
        return None


def _held(run: Run) -> str | None:
    document = read_document(run.dir.profile / MEMORY)
    try:
        return held.svg(document, run.run_id)
    except (KeyError, TypeError, ValueError, IndexError):
        return None


_TIMES = (("time_ms", 1.0), ("time_us", 1e-3), ("time_s", 1e3))


def kernels(cells: Sequence[Cell]) -> Section | None:
    """Return the kernels that take most of the time, from profile/*.json: `kernels`, a list of `{name, time_ms (or _us,
    _s), calls, group}`; files of another form are left out."""
    records = [who(cell) | kernel for cell in cells for kernel in (first_of(cell, _kernels) or [])]
    if not records:
        return None
    rows = [
        [r["trained_by"], r["batch"], short(r["kernel"]), r["group"] or "", f"{r['time_ms']:,.1f}",
         units.percent(r["share"]), str(r["calls"] or "")]
        for r in records
    ]  # fmt: skip
    headings = ["trained by", "batch", "kernel", "group", "ms", "share", "calls"]
    return Section(
        "kernels", "Where the time goes", Table({}, headings, rows, [], ("trained by", "kernel", "group")), (), records
    )


def _kernels(run: Run) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for path in sorted(run.dir.profile.glob("*.json")):
        document = read_document(path)
        listed = document.get("kernels") if isinstance(document, dict) else None
        entries = [
            {"kernel": entry["name"], "group": entry["group"] if isinstance(entry.get("group"), str) else None,
             "time_ms": time, "calls": entry.get("calls")}
            for entry in (listed if isinstance(listed, list) else [])
            if isinstance(entry, dict) and isinstance(entry.get("name"), str) and (time := _time_ms(entry)) is not None
        ]  # fmt: skip
        if entries:
            break
    total = sum(kernel["time_ms"] for kernel in entries)
    entries.sort(key=lambda kernel: -kernel["time_ms"])
    return [kernel | {"share": kernel["time_ms"] / total if total else None} for kernel in entries[:_MOST_KERNELS]]


def _time_ms(entry: dict[str, Any]) -> float | None:
    for name, scale in _TIMES:
        value = entry.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
            return float(value) * scale
    return None
