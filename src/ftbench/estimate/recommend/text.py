"""A recommendation as text, as JSON and as a spec file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from ftbench.core import units
from ftbench.estimate.recommend.ranking import Found, Option, Wanted, as_runnable, may_miss
from ftbench.spec.experiment import Experiment
from ftbench.spec.optimizations import Optimizations
from ftbench.store.summary import optimizations_on

SHOWN = 10
FP8 = "fp8 multiplies in 8 bits: the loss may differ, so compare it with a run in bf16 first"
_HEADINGS = (
    "#", "method", "with", "batch", "accum", "GPU", "time", "slow end", "deadline", "free GiB", "cost", "kWh", "basis",
)  # fmt: skip
_RIGHT = {"#", "batch", "accum", "time", "slow end", "free GiB", "cost", "kWh"}


def as_text(found: Found) -> str:
    """The table, what was ruled out, and the best spec."""
    wanted = found.wanted
    limits = [f"{units.count(wanted.samples)} samples"]
    limits += [f"deadline {units.seconds(wanted.deadline_s)}"] if wanted.deadline_s else []
    limits += [f"at most {wanted.max_cost:g}"] if wanted.max_cost is not None else []
    limits += [f"{wanted.effective_batch:,} samples a step"] if wanted.effective_batch else []
    lines = [" · ".join([wanted.spec.model.id, *limits, f"best by {wanted.objective}"]), ""]
    if found.options:
        lines += [*_table(found.options[:SHOWN], wanted), "", *_remarks(found)]
    else:
        lines += _nothing(found)
    if found.ruled_out:
        lines += ["", f"ruled out, of {units.count(found.weighed)} ways:"]
        lines += [f"{count:>6}  {reason}" for reason, count in list(found.ruled_out.items())[:SHOWN]]
        left = sum(list(found.ruled_out.values())[SHOWN:])
        lines += [f"{left:>6}  for other reasons (--json names them)"] if left else []
    if found.options:
        lines += ["", "the best as a spec (-o FILE writes it):", as_yaml(found).rstrip()]
    return "\n".join(lines) + "\n"


def _table(options: Sequence[Option], wanted: Wanted) -> list[str]:
    rows = [list(_HEADINGS), *(_row(place, option, wanted) for place, option in enumerate(options, 1))]
    kept = [i for i in range(len(_HEADINGS)) if any(row[i] for row in rows[1:])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    return [
        "  ".join(row[i].rjust(widths[i]) if _HEADINGS[i] in _RIGHT else row[i].ljust(widths[i]) for i in kept).rstrip()
        for row in rows
    ]


def _row(place: int, option: Option, wanted: Wanted) -> list[str]:
    train = option.spec.train
    return [
        str(place), method_words(option.spec), switches(option.spec), str(train.batch_size),
        str(train.gradient_accumulation_steps), option.gpu.name, units.seconds(option.seconds.expected),
        units.seconds(option.seconds.high), _keeps(option, wanted), units.gibibytes(option.headroom),
        "" if option.cost is None else f"{option.cost} ({option.cost.way})", f"{option.kwh:.3g}",
        option.duration.basis,
    ]  # fmt: skip


def _keeps(option: Option, wanted: Wanted) -> str:
    if wanted.deadline_s is None:
        return ""
    if option.seconds.expected > wanted.deadline_s:
        return "misses"
    return "may miss" if may_miss(option, wanted) else "keeps"


def method_words(spec: Experiment) -> str:
    """`unsloth 4-bit`, `lora`."""
    if spec.method.name != "unsloth":
        return spec.method.name
    own = getattr(spec.method, "use_gradient_checkpointing", "off")
    return f"unsloth {'4' if spec.method.quantised else '16'}-bit" + ("" if own == "off" else ", checkpointing")


def switches(spec: Experiment) -> str:
    """The optimizations that are on, short; `none` without any."""
    on = optimizations_on(spec.optimizations.model_dump())
    on += ["fused AdamW"] if spec.train.optimizer == "adamw_torch_fused" else []
    return ", ".join(on).replace("gradient_checkpointing", "checkpointing").replace("_", " ") or "none"


def _remarks(found: Found) -> list[str]:
    """What the reader of the table must know; once each."""
    best = found.options[0]
    lines = [f"time: {best.duration.confidence} (the best)", f"lengths: {best.duration.lengths}"]
    own = found.wanted.spec.dataset.samples
    if own is not None and found.wanted.samples > own:
        lines.append(f"passes over the {units.count(own)} samples of the data set: {found.wanted.samples / own:,.1f}")
    if best.duration.upper_bound:
        lines.append("so times are upper bounds: run a few steps on this data once, and ask again")
    if count := sum(may_miss(option, found.wanted) for option in found.options):
        which = "each of them" if count == len(found.options) else f"{units.count(count)} of them, ranked last,"
        lines.append(
            f"{units.count(len(found.options))} ways keep the deadline as expected; {which} may miss it at the slow end"
        )
    if any(option.spec.optimizations.fp8 != "off" for option in found.options[:SHOWN]):
        lines.append(FP8)
    if len({option.spec.method.quantised for option in found.options[:SHOWN]}) > 1:
        lines.append("4-bit base weights are not the 16-bit ones: compare the loss before the night")
    if found.wanted.effective_batch:
        lines.append("samples a step are held; with --effective-batch any a step may be larger, and learn otherwise")
    else:
        lines.append("samples a step differ between rows, and so what is learned: --effective-batch N holds them")
    return lines


def _nothing(found: Found) -> list[str]:
    if found.closest is None:
        closest = [f"closest to it is {found.missed}"] if found.missed else []
        return [f"no way to train it fits the memory of {_gpus(found)}", *closest]
    return [f"nothing meets these limits. The closest is {found.missed}:", "", *_table([found.closest], found.wanted)]


def _gpus(found: Found) -> str:
    names = [gpu.name for gpu in found.wanted.gpus]
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} GPUs"


def as_yaml(found: Found) -> str:
    """The best option's spec, with what is expected of it in its head."""
    best = found.options[0]
    spec = as_runnable(best, found.wanted)
    head = [
        f"# Recommended by ftbench for {units.count(found.wanted.samples)} samples on {best.gpu.name}, best by "
        f"{found.wanted.objective}.",
        f"# Expected: {units.seconds(best.seconds.expected)} ({best.duration.confidence}),",
        f"# {units.gibibytes(best.memory.device.expected)} of {units.gibibytes(best.memory.total)} GiB.",
    ]
    if may_miss(best, found.wanted):
        head.append(f"# May miss the deadline: {units.seconds(best.seconds.high)} at the slow end of the band.")
    return "\n".join(head) + "\n" + yaml.safe_dump(spec_values(spec), sort_keys=False, allow_unicode=True)


def spec_values(spec: Experiment) -> dict[str, Any]:
    """What a spec file has to say: all that is not as it is by default, and the name of the method."""
    values: dict[str, Any] = spec.model_dump(mode="json", exclude_defaults=True)
    values["method"] = {"name": spec.method.name, **values.get("method", {})}
    return {key: value for key, value in values.items() if value != {}}


def as_json(found: Found) -> dict[str, Any]:
    """One document: options best first, what was ruled out, and the best spec."""
    wanted = found.wanted
    return {
        "model": wanted.spec.model.id, "samples": wanted.samples, "deadline_s": wanted.deadline_s,
        "max_cost": wanted.max_cost, "objective": wanted.objective,
        "options": [_record(option, wanted) for option in found.options],
        "closest": None if found.closest is None else _record(found.closest, wanted),
        "missed": found.missed or None, "ruled_out": found.ruled_out, "weighed": found.weighed,
        "spec": spec_values(as_runnable(found.options[0], wanted)) if found.options else None,
    }  # fmt: skip


def _record(option: Option, wanted: Wanted) -> dict[str, Any]:
    train, seconds, memory = option.spec.train, option.seconds, option.memory
    return {
        "gpu": option.gpu.name, "method": option.spec.method.model_dump(mode="json"),
        "optimizations": _on(option.spec.optimizations), "optimizer": train.optimizer,
        "batch_size": train.batch_size, "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "seconds": _band(seconds), "samples_per_hour": option.duration.samples_per_hour,
        "may_miss_deadline": None if wanted.deadline_s is None else may_miss(option, wanted),
        "memory_gb": _band(memory.device), "total_gb": memory.total, "headroom_gb": option.headroom,
        "cost": None if option.cost is None else option.cost.value,
        "currency": None if option.cost is None else option.cost.currency,
        "way": None if option.cost is None else option.cost.way, "joules": _band(option.joules),
        "basis": option.duration.basis, "confidence": option.duration.confidence,
        "changes_the_loss": FP8 if option.spec.optimizations.fp8 != "off" else None,
    }  # fmt: skip


def _on(optimizations: Optimizations) -> dict[str, Any]:
    return optimizations.model_dump(mode="json", exclude_defaults=True)


def _band(band: Any) -> dict[str, float]:
    return {"low": band.low, "expected": band.expected, "high": band.high}
