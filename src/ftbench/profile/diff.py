"""Two profiles by kernel group: where the time between them went. All figures are per step."""

from collections.abc import Sequence
from typing import Any

from ftbench.core import units
from ftbench.core.compare import Difference
from ftbench.core.table import folded, text_table
from ftbench.profile.groups import GROUPS
from ftbench.profile.names import short

_MOST_ALONE = 10


def diff(a: dict[str, Any], b: dict[str, Any], differences: Sequence[Difference] | None = None) -> dict[str, Any]:
    """Return where the time differs. `groups`: ms and calls a step in each, the difference, the ratio, the share of the
    difference between all groups; None where a group is in one only. `idle` is what is left of the step. `only_a` and
    `only_b` are the kernels that take most and are in one only. `differences` are those of the runs; None is
    unknown."""
    return {
        "a": _whole(a),
        "b": _whole(b),
        "same_gpu": a.get("gpu") == b.get("gpu"),
        "differences": None
        if differences is None
        else [{"key": each.key, "a": each.baseline, "b": each.candidate} for each in differences],
        "groups": _groups(a, b),
        "idle": _pair(_idle(a), _idle(b)),
        "kernels": _pair(_kernels_ms(a), _kernels_ms(b)),
        "step": _pair(a["window_ms"] / a["steps"], b["window_ms"] / b["steps"]),
        "only_a": _alone(a, b),
        "only_b": _alone(b, a),
    }


def _whole(document: dict[str, Any]) -> dict[str, Any]:
    return {
        "gpu": document.get("gpu"), "device": document.get("device"), "steps": document["steps"],
        "step_ms": document["window_ms"] / document["steps"],
        "step_before_ms": (document.get("step_ms") or {}).get("before"),
        "busy_share": document["busy_share"], "busy_share_unprofiled": document.get("busy_share_unprofiled"),
        "kernels_per_step": sum(group["calls"] for group in document["groups"]) / document["steps"],
    }  # fmt: skip


def _idle(document: dict[str, Any]) -> float:
    return float(document["window_ms"] * (1 - document["busy_share"]) / document["steps"])


def _kernels_ms(document: dict[str, Any]) -> float:
    return sum(float(group["time_ms"]) for group in document["groups"]) / int(document["steps"])


def _pair(a: float | None, b: float | None) -> dict[str, Any]:
    """Return both, `difference` b - a, and `ratio` b / a."""
    return {
        "a_ms": a, "b_ms": b, "difference_ms": (b or 0.0) - (a or 0.0), "ratio": b / a if a and b is not None else None,
    }  # fmt: skip


def _groups(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    sides = [{group["group"]: group for group in document["groups"]} for document in (a, b)]
    names = [name for name in (*GROUPS, *(name for side in sides for name in side if name not in GROUPS))
             if any(name in side for side in sides)]  # fmt: skip
    whole = _kernels_ms(b) - _kernels_ms(a)
    rows = []
    for name in dict.fromkeys(names):
        rows_of_group = [side.get(name) for side in sides]
        steps = (a["steps"], b["steps"])
        times = [each["time_ms"] / n if each else None for each, n in zip(rows_of_group, steps, strict=True)]
        calls = [each["calls"] / n if each else None for each, n in zip(rows_of_group, steps, strict=True)]
        pair = _pair(*times)
        share = pair["difference_ms"] / whole if whole else None
        rows.append({"group": name, **pair, "share_of_difference": share, "a_calls": calls[0], "b_calls": calls[1]})
    return sorted(rows, key=lambda row: -abs(row["difference_ms"]))


def _alone(this: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    known = {kernel["name"] for kernel in other["kernels"]}
    kernels: dict[str, dict[str, Any]] = {}
    for kernel in this["kernels"]:
        if kernel["name"] not in known:
            entry = kernels.setdefault(
                kernel["name"], {"name": kernel["name"], "group": kernel.get("group"), "ms": 0.0, "calls": 0.0}
            )
            entry["ms"] += kernel["time_ms"] / this["steps"]
            entry["calls"] += (kernel["calls"] or 0) / this["steps"]
    return sorted(kernels.values(), key=lambda entry: -entry["ms"])[:_MOST_ALONE]


def as_text(comparison: dict[str, Any], names: tuple[str, str]) -> str:
    """Return the comparison for a person."""
    a, b = comparison["a"], comparison["b"]
    work = "kernels" if "cuda" in (a["device"], b["device"]) else "operators"
    sides = [("A", f"{names[0]}: {_about(a)}"), ("B", f"{names[1]}: {_about(b)}")]
    lines = [text_table(["", ""], sides)]
    if not comparison["same_gpu"]:
        lines.append(f"note: not the same GPU: {a['gpu'] or 'none (CPU)'} against {b['gpu'] or 'none (CPU)'}")
    rows = [_row(each["group"], each) for each in comparison["groups"]]
    rows += [
        _row(name, comparison[key]) for name, key in ((f"all {work}", "kernels"), ("idle", "idle"), ("step", "step"))
    ]
    headings = ("ms a step", ">A", ">B", ">B - A", ">B / A", ">of B - A", ">calls A", ">calls B")
    parts = ["\n".join([*lines, *_differences(comparison["differences"])]), text_table(headings, rows)]
    for side in ("A", "B"):
        if alone := comparison[f"only_{side.lower()}"]:
            rows = [[f"{each['ms']:.3f}", f"{each['calls']:,.0f}", f"{short(each['name'])} ({each['group']})"]
                    for each in alone]  # fmt: skip
            parts.append(text_table((">ms", ">calls", f"only in {side}, a step"), rows))
    return "\n\n".join(parts)


def _differences(differences: Sequence[dict[str, str]] | None) -> list[str]:
    if differences is None:
        return [folded("note: whether both ran the same spec is not known: their run directories are not there")]
    if not differences:
        return ["nothing differs in their specs, data and versions"]
    return [text_table(["", ""], [("differs", f"{each['key']}: {each['a']} → {each['b']}") for each in differences])]


def _about(side: dict[str, Any]) -> str:
    busy = units.percent(side["busy_share"])
    if side["busy_share_unprofiled"] is not None:
        busy += f" ({units.percent(side['busy_share_unprofiled'])} without the profiler)"
    before = f", {side['step_before_ms']:.1f} ms without the profiler" if side["step_before_ms"] else ""
    return (
        f"{side['gpu'] or 'the CPU'}, {side['steps']} steps of {side['step_ms']:.1f} ms{before}, busy {busy}, "
        f"{side['kernels_per_step']:,.0f} {'kernels' if side['device'] == 'cuda' else 'operators'} a step"
    )


def _row(name: str, pair: dict[str, Any]) -> list[str]:
    def text(key: str, form: str, factor: float = 1.0) -> str:
        return "" if pair.get(key) is None else format(pair[key] * factor, form)

    share = text("share_of_difference", "z.0f", 100)
    return [
        name, text("a_ms", ".3f"), text("b_ms", ".3f"), text("difference_ms", "+.3f"), text("ratio", ".2f"),
        share and f"{share} %", text("a_calls", ",.0f"), text("b_calls", ",.0f"),
    ]  # fmt: skip
