"""A profile for a person: groups, kernels, phases, idle gaps, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.profile.names import short
from ftbench.store.rundir import MEMORY, read_json

_KERNELS, _GAPS, _ALIVE, _OPERATORS = 15, 5, 8, 8


def as_text(document: dict[str, Any], folder: Path) -> str:
    """Return the profile for a person; times are per step."""
    on_gpu, steps = document["device"] == "cuda", document["steps"]
    lines = [*_head(document), "", f"{'group':<22}{'ms/step':>10}{'share':>9}{'calls/step':>12}"]
    lines += [
        f"{group['group']:<22}{group['time_ms'] / steps:>10.3f}{_percent(group['share']):>9}"
        f"{group['calls'] / steps:>12,.0f}"
        for group in document["groups"]
    ]
    lines += ["", f"{'ms/step':>10}{'share':>8}{'calls/step':>11}{'mean µs':>10}  {'kernel' if on_gpu else 'operator'}"]
    lines += [
        f"{kernel['time_ms'] / steps:>10.3f}{_percent(kernel['share']):>8}{kernel['calls'] / steps:>11,.0f}"
        f"{kernel['mean_us'] or 0:>10.1f}  {short(kernel['name'])} ({kernel['group']})"
        for kernel in document["kernels"][:_KERNELS]
    ]
    if on_gpu:
        lines += ["", f"{'GPU ms/step':>12}{'CPU ms/step':>12}{'calls/step':>11}  operator"]
        lines += [
            f"{each['device_ms'] / steps:>12.3f}{each['cpu_ms'] / steps:>12.3f}{each['calls'] / steps:>11,.0f}  "
            f"{each['name']}"
            for each in document["operators"][:_OPERATORS]
        ]
    lines += ["", f"{'phase':<12}{'thread ms':>11}{'work ms':>11}{'idle ms':>11}"]
    lines += [
        f"{phase['phase']:<12}{phase['cpu_ms'] / steps:>11.3f}{phase['device_ms'] / steps:>11.3f}"
        f"{phase['idle_ms'] / steps:>11.3f}"
        for phase in document["phases"]
    ]
    lines += ["", "the longest idle stretches, and what the CPU did meanwhile" if on_gpu else
              "the longest stretches without an operator"]  # fmt: skip
    lines += [_gap(gap) for gap in document["gaps"][:_GAPS]]
    return "\n".join([*lines, *_memory(folder), *_below(document, folder)])


def _head(document: dict[str, Any]) -> list[str]:
    device, times = document["gpu"] or "the CPU", document["step_ms"]
    step = f"step      {units.seconds(times['profiled'] / 1e3)} profiled"
    if times["before"]:
        step += f", {units.seconds(times['before'] / 1e3)} just before"
    busy = f"busy      {units.percent(document['busy_share'])} of the profiled time"
    if document["device"] != "cuda":
        busy = f"operators {units.percent(document['busy_share'])} of the time, the rest is Python and waiting"
    elif document["busy_share_unprofiled"] is not None:
        busy += f"; {units.percent(document['busy_share_unprofiled'])} of the steps just before, by the same work"
    idle = document["idle"]
    return [
        f"{document['steps']} steps on {device}", step, busy,
        f"idle      {idle['ms'] / document['steps']:.3f} ms a step, {idle['gaps'] / document['steps']:,.0f} stretches",
        f"backward  {units.percent(document['backward_share'])} of the work",
    ]  # fmt: skip


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _gap(gap: dict[str, Any]) -> str:
    ran = ", ".join(f"{each['name']} {each['ms']:.3f} ms" for each in gap["meanwhile"])
    return f"{gap['ms']:>10.3f} ms  {gap['phase'] or 'between phases'}: {ran}"


def _memory(folder: Path) -> list[str]:
    document = read_json(folder / MEMORY)
    if "peak" not in document:
        return []
    peak = document["peak"]
    parts = ", ".join(f"{name} {units.gibibytes(peak[name])}" for name in document["categories"] if peak.get(name))
    lines = ["", f"memory    {units.gibibytes(peak['total_gb'])} GiB at its highest, in {peak['phase']}: {parts}"]
    return lines + [
        f"{units.gibibytes(each['gb']):>10} GiB  {each['category']}, {each['tensors']} tensors"
        + (f", {each['made_by']}" if each["made_by"] else "")
        for each in document["alive"][:_ALIVE]
    ]


def _below(document: dict[str, Any], folder: Path) -> list[str]:
    trace = document.get("trace") or {}
    cut = (
        ""
        if trace.get("complete", True)
        else f"; it holds the first {trace['kept_ms']:.0f} ms of {document['window_ms']:.0f}"
    )
    return ["", f"trace     {folder / trace['file']}{cut}" if trace else "trace     none",
            "          open it in ui.perfetto.dev; timeline.svg beside it shows one step"]  # fmt: skip
