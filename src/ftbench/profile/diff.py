"""Two profiles by kernel group: where the time between them went. All figures are per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ftbench.core import units
from ftbench.core.compare import Difference
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
    a, b = comparison["a"], comparison["b"]
    lines = [f"A  {names[0]}: {_about(a)}", f"B  {names[1]}: {_about(b)}"]
    if not comparison["same_gpu"]:
        lines.append(f"note: not the same GPU: {a['gpu'] or 'none (CPU)'} against {b['gpu'] or 'none (CPU)'}")
    lines += _differences(comparison["differences"])
    lines += [
        "",
        f"{'ms a step':<22}{'A':>10}{'B':>10}{'B - A':>11}{'B / A':>8}{'of all':>9}{'calls A':>10}{'calls B':>10}",
    ]
    lines += [
        _line(row["group"], row, row["share_of_difference"], row["a_calls"], row["b_calls"])
        for row in comparison["groups"]
    ]
    lines += [
        _line(name, comparison[key]) for name, key in (("all kernels", "kernels"), ("idle", "idle"), ("step", "step"))
    ]
    for side, key in (("A", "only_a"), ("B", "only_b")):
        if comparison[key]:
            lines += ["", f"only in {side}: ms and calls a step"]
            lines += [
                f"{each['ms']:>10.3f}{each['calls']:>9,.0f}  {short(each['name'])} ({each['group']})"
                for each in comparison[key]
            ]
    return "\n".join(lines)


def _differences(differences: Sequence[dict[str, str]] | None) -> list[str]:
    if differences is None:
        return ["note: whether both ran the same spec is not known: their run directories are not there"]
    return [f"differs  {each['key']}: {each['a']} → {each['b']}" for each in differences] or [
        "nothing differs in their specs, data and versions"
    ]


def _about(side: dict[str, Any]) -> str:
    busy = units.percent(side["busy_share"])
    if side["busy_share_unprofiled"] is not None:
        busy += f" ({units.percent(side['busy_share_unprofiled'])} without the profiler)"
    before = f", {side['step_before_ms']:.1f} ms without the profiler" if side["step_before_ms"] else ""
    return (
        f"{side['gpu'] or 'the CPU'}, {side['steps']} steps of {side['step_ms']:.1f} ms{before}, busy {busy}, "
        f"{side['kernels_per_step']:,.0f} {'kernels' if side['device'] == 'cuda' else 'operators'} a step"
    )


def _line(
    name: str,
    pair: dict[str, Any],
    share: float | None = None,
    a_calls: float | None = None,
    b_calls: float | None = None,
) -> str:
    a, b = (f"{pair[key]:.3f}" if pair[key] is not None else "" for key in ("a_ms", "b_ms"))
    ratio = f"{pair['ratio']:.2f}" if pair["ratio"] is not None else ""
    part = f"{share * 100:.0f} %" if share is not None else ""
    calls = [f"{count:,.0f}" if count is not None else "" for count in (a_calls, b_calls)]
    figures = f"{a:>10}{b:>10}{pair['difference_ms']:>+11.3f}{ratio:>8}{part:>9}{calls[0]:>10}{calls[1]:>10}"
    return f"{name:<22}{figures}".rstrip()
