"""A recommendation as text, as JSON and as a spec file."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ftbench.core import units
from ftbench.core.hardware import capability_of
from ftbench.core.table import folded, text_table
from ftbench.estimate import by_image_size
from ftbench.estimate.recommend.candidates import left_out
from ftbench.estimate.recommend.ranking import Goal, Option, Recommendation, as_runnable, may_miss, place_of
from ftbench.estimate.time.duration import MEASURED, OTHER, SHEET, SPREAD
from ftbench.estimate.time.text import NIGHT_H
from ftbench.spec.ablation import with_changes
from ftbench.spec.experiment import Experiment, resolve
from ftbench.store.summary import optimizations_on

SHOWN = 10
EITHER = "triton kernels or not"
_UNSEEN = {
    OTHER: "no run there had all these settings, so the slow end is farther off",
    SHEET: "no run there tells of such steps, so the slow end is farthest off",
}
FP8 = "fp8 multiplies in 8 bits: the loss may differ, so compare it with a run in bf16 first"
_HEADINGS = (
    ">#", "method", "GPU", "with", ">time", ">batch", "deadline", ">free GiB", ">cost", ">slow end", ">passes", ">kWh",
    "known from",
)  # fmt: skip


def as_text(answer: Recommendation, output: Path | None = None) -> str:
    """Return the table, what was ruled out, and the best spec, which stands in `output`."""
    goal = answer.goal
    limits = [*([goal.gpus[0].name] if len(goal.gpus) == 1 else []), units.some(round(goal.samples), "sample")]
    limits += [f"deadline {units.seconds(goal.deadline_s)}"] if goal.deadline_s else []
    limits += [f"at most {goal.max_cost:g}"] if goal.max_cost is not None else []
    limits += [f"{units.some(goal.effective_batch, 'sample')} a step"] if goal.effective_batch else []
    lines = [folded(" · ".join([goal.spec.model.id, *limits, f"best by {goal.objective}"])), ""]
    if answer.options:
        rows = _shown(answer)
        lines += [_table(rows, goal)]
        if (count := len(answer.options)) > len(rows):
            lines.append(folded(f"the best {len(rows)} of {units.count(count)} ways that fit (--json has all)"))
        lines += ["", *map(folded, _remarks(answer, rows))]
    else:
        lines += map(folded, _nothing(answer))
        lines += ["", _table([(answer.closest, switches(answer.closest.spec))], goal)] if answer.closest else []
    if answer.ruled_out:
        lines += ["", f"ruled out, of {units.some(answer.weighed, 'way')}:"]
        reasons = [(units.count(count), reason) for reason, count in list(answer.ruled_out.items())[:SHOWN]]
        left = sum(list(answer.ruled_out.values())[SHOWN:])
        reasons += [(units.count(left), "for other reasons (--json names them)")] if left else []
        lines.append(text_table(["", ">", ""], [("", *reason) for reason in reasons]))
    if sizes := _image_sizes(answer):
        lines += ["", "the best with images of other sizes:", by_image_size.as_text(sizes, NIGHT_H)]
    if answer.options:
        where = "(-o FILE writes it)" if output is None else f"(`ftbench run {output}` trains it)"
        lines += ["", f"the best as a spec {where}:", as_yaml(answer).rstrip()]
    return "\n".join(lines) + "\n"


def _image_sizes(answer: Recommendation) -> list[dict[str, Any]]:
    """Return what the best option does with images of several sizes; nothing without one, or without images."""
    if not answer.options:
        return []
    best, goal = answer.options[0], answer.goal
    return by_image_size.by_image_size(best.spec, best.gpu, goal.store, NIGHT_H, goal.config)


def _shown(answer: Recommendation) -> list[tuple[Option, str]]:
    """Return the best options, each with its optimizations in words. Two that differ in our own kernels alone, and in
    no figure by more than what a measured step may be off, are the better one of them; two that differ in nothing
    are one."""
    rows: list[tuple[Option, str]] = []
    for option in answer.options:
        at = next((at for at, (better, _) in enumerate(rows) if _alike(better, option, answer.goal)), None)
        if at is None:
            rows += [(option, switches(option.spec))] if len(rows) < SHOWN else []
        elif not _same_kernels(rows[at][0], option):
            rows[at] = rows[at][0], f"{switches(_without_kernels(option))}, {EITHER}"
    return rows


def _alike(better: Option, option: Option, goal: Goal) -> bool:
    if better.gpu is not option.gpu or _keeps(better, goal) != _keeps(option, goal):
        return False
    pairs = zip(*((each.seconds, each.memory.device, each.joules) for each in (better, option)), strict=True)
    if any(max(a.expected, b.expected) > SPREAD[MEASURED] * min(a.expected, b.expected) for a, b in pairs):
        return False
    if _same_kernels(better, option):
        return better.spec == option.spec
    return _without_kernels(better) == _without_kernels(option)


def _same_kernels(better: Option, option: Option) -> bool:
    return bool(better.spec.optimizations.triton_kernels == option.spec.optimizations.triton_kernels)


def _without_kernels(option: Option) -> Experiment:
    """Return the spec as its GPU runs it, but without our own kernels."""
    spec = resolve(option.spec, capability_of(option.gpu))
    return with_changes(spec, {"optimizations.triton_kernels": False, "optimizations.attention": "auto"})


def _table(options: Sequence[tuple[Option, str]], goal: Goal) -> str:
    """Return a line an option; columns that none has a value for are left out."""
    rows = [_row(rank, option, words, goal) for rank, (option, words) in enumerate(options, 1)]
    kept = [at for at in range(len(_HEADINGS)) if any(row[at] for row in rows)]
    return text_table([_HEADINGS[at] for at in kept], [[row[at] for at in kept] for row in rows])


def _row(rank: int, option: Option, words: str, goal: Goal) -> list[str]:
    train, cost = option.spec.train, option.cost
    return [
        str(rank), method_words(option.spec),
        place_of(option.spec, option.gpu) if len(goal.gpus) > 1 or goal.counts != (1,) else "",
        words, units.seconds(option.seconds.expected),
        str(train.batch_size), _keeps(option, goal), units.gibibytes(option.headroom),
        "" if cost is None else f"{cost} ({cost.way})",
        units.seconds(option.seconds.high), str(train.gradient_accumulation_steps), f"{option.kwh:.3g}",
        option.duration.basis,
    ]  # fmt: skip


def _keeps(option: Option, goal: Goal) -> str:
    if goal.deadline_s is None:
        return ""
    if option.seconds.expected > goal.deadline_s:
        return "misses"
    return "may miss" if may_miss(option, goal) else "keeps"


def method_words(spec: Experiment) -> str:
    """Return `unsloth 4-bit`, `lora`."""
    if spec.method.name != "unsloth":
        return spec.method.name
    own = getattr(spec.method, "use_gradient_checkpointing", "off")
    return f"unsloth {'4' if spec.method.quantised else '16'}-bit" + ("" if own == "off" else ", checkpointing")


def switches(spec: Experiment) -> str:
    """Return the optimizations that are on, short; `none` without any."""
    on = optimizations_on(spec.optimizations.model_dump())
    on += ["fused AdamW"] if spec.train.optimizer == "adamw_torch_fused" else []
    return ", ".join(on).replace("gradient_checkpointing", "checkpointing").replace("_", " ") or "none"


def _remarks(answer: Recommendation, rows: Sequence[tuple[Option, str]]) -> list[str]:
    """Return what the reader of the table must know; once each."""
    best, shown = answer.options[0], [option for option, _ in rows]
    lines = [f"time of the best: {best.duration.confidence}", f"lengths: {best.duration.lengths}"]
    own = answer.goal.spec.dataset.samples
    if own is not None and answer.goal.samples > own:
        lines.append(f"passes over the {units.some(own, 'sample')} of the data set: {answer.goal.samples / own:,.1f}")
    if answer.goal.deadline_s:
        most = best.duration.samples_in(answer.goal.deadline_s)
        passes = f", {most.expected / own:,.0f} passes over the data set" if own else ""
        lines.append(
            f"in {units.seconds(answer.goal.deadline_s)} the best trains {units.count(most.expected)} samples "
            f"({units.count(most.low)} to {units.count(most.high)}){passes}"
        )
    if best.duration.upper_bound:
        lines.append("so times are upper bounds: run a few steps on this data once, and ask again")
    if count := sum(may_miss(option, answer.goal) for option in answer.options):
        which = "each of them" if count == len(answer.options) else f"{units.count(count)} of them, ranked last,"
        lines.append(
            f"{units.count(len(answer.options))} ways keep the deadline as expected; {which} may miss it at the "
            "slow end"
        )
    lines += _without(answer)
    known = {option.duration.basis for option in shown}
    lines += [f"known from {basis}: {sentence}" for basis, sentence in _UNSEEN.items() if basis in known]
    if any(words.endswith(EITHER) for _, words in rows):
        lines.append(f"{EITHER}: no figure of it differs by more than {SPREAD[MEASURED] - 1:.0%}".replace("%", " %"))
    if any(option.spec.optimizations.fp8 != "off" for option in shown):
        lines.append(FP8)
    lines += _slow_8_bits(answer)
    if len({option.spec.method.quantised for option in shown}) > 1:
        lines.append("4-bit base weights are not the 16-bit ones: compare the loss before the night")
    if answer.goal.effective_batch and answer.freer is None:
        lines.append("samples a step are held; with --effective-batch any a step may be larger, and learn otherwise")
    elif answer.freer:
        lines.insert(0, _freer(answer, answer.freer))
    else:
        lines.append("samples a step differ between rows, and so what is learned: --effective-batch N holds them")
    return lines


def _slow_8_bits(answer: Recommendation) -> list[str]:
    """Return that 8 bits gain nothing where Python sets the pace of the fastest way with them."""
    by_bits: dict[bool, Option] = {}
    for option in sorted(answer.options, key=lambda option: option.seconds.expected):
        by_bits.setdefault(option.spec.optimizations.fp8 != "off", option)
    small, plain = by_bits.get(True), by_bits.get(False)
    if small is None or plain is None or small.duration.bound != "host":
        return []
    if small.seconds.expected < plain.seconds.expected:
        return []
    times = " against ".join(units.seconds(each.seconds.expected) for each in (small, plain))
    few = f"of {units.count(small.duration.tokens)} tokens a step 8 bits are no faster than 16"
    return [f"{few} ({times}): the GPU waits for Python to start their kernels"]


def _without(answer: Recommendation) -> list[str]:
    """Return what the best does not do of what the spec asks for beside the training; nothing where it does all."""
    best = answer.options[0]
    keys = left_out(answer.goal.spec, best.spec)
    return [f"the best is without {keys}, which {best.spec.launch.strategy} refuses"] if keys else []


def _freer(answer: Recommendation, option: Option) -> str:
    """Return the sentence on the best way with another number of samples a step."""
    by = {
        "speed": f"{units.seconds(option.seconds.expected)} where the best above takes "
        f"{units.seconds(answer.options[0].seconds.expected)}",
        "cost": str(option.cost), "energy": f"{option.kwh:.3g} kWh",
        "memory": f"{units.gibibytes(option.memory.device.expected)} GiB",
    }[answer.goal.objective]  # fmt: skip
    return (
        f"far better where a step may have other than {units.some(answer.goal.effective_batch or 0, 'sample')} "
        f"(--effective-batch any; it learns otherwise): {method_words(option.spec)} with {switches(option.spec)}, "
        f"about {units.rate(option.duration.samples)} samples a step: {by}"
    )


def _nothing(answer: Recommendation) -> list[str]:
    if answer.closest is None:
        closest = [f"closest to it is {answer.missed}"] if answer.missed else []
        return [f"no way to train it fits the memory of {_gpus(answer)}", *closest]
    return [f"nothing meets these limits. The closest is {answer.missed}:"]


def _gpus(answer: Recommendation) -> str:
    names = [gpu.name for gpu in answer.goal.gpus]
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} GPUs"


def as_yaml(answer: Recommendation) -> str:
    """Return the best option's spec, with what is expected of it in its head."""
    best = answer.options[0]
    spec = as_runnable(best, answer.goal)
    head = [
        f"# Recommended by ftbench for {units.some(round(answer.goal.samples), 'sample')} on "
        f"{place_of(spec, best.gpu)}, best by {answer.goal.objective}.",
        f"# Expected: {units.seconds(best.seconds.expected)}, {units.gibibytes(best.memory.device.expected)} of "
        f"{units.gibibytes(best.memory.total)} GiB.",
        textwrap.fill(f"# The time is known from: {best.duration.confidence}.", 100, subsequent_indent="# "),
    ]
    head += [f"# T{text[1:]}." for text in _without(answer)]
    if may_miss(best, answer.goal):
        head.append(f"# May miss the deadline: {units.seconds(best.seconds.high)} at the slow end of the band.")
    return "\n".join(head) + "\n" + yaml.safe_dump(spec_values(spec), sort_keys=False, allow_unicode=True)


def spec_values(spec: Experiment) -> dict[str, Any]:
    """Return what a spec file has to say: all that is not as it is by default, and the name of the method."""
    values: dict[str, Any] = spec.model_dump(mode="json", exclude_defaults=True)
    values["method"] = {"name": spec.method.name, **values.get("method", {})}
    return {key: value for key, value in values.items() if value != {}}


def as_json(answer: Recommendation) -> dict[str, Any]:
    """Return one document: options best first, what was ruled out, and the best spec."""
    goal = answer.goal
    return {
        "model": goal.spec.model.id, "samples": goal.samples, "deadline_s": goal.deadline_s,
        "max_cost": goal.max_cost, "objective": goal.objective,
        "options": [_record(option, goal) for option in answer.options],
        "closest": None if answer.closest is None else _record(answer.closest, goal),
        "freer": None if answer.freer is None else _record(answer.freer, goal),
        "missed": answer.missed or None, "ruled_out": answer.ruled_out, "weighed": answer.weighed,
        "by_image_size": _image_sizes(answer),
        "spec": spec_values(as_runnable(answer.options[0], goal)) if answer.options else None,
    }  # fmt: skip


def _record(option: Option, goal: Goal) -> dict[str, Any]:
    train, launch, seconds, memory = option.spec.train, option.spec.launch, option.seconds, option.memory
    return {
        "gpu": option.gpu.name, "gpus": launch.gpus, "strategy": launch.strategy, "offload": launch.offload,
        "method": option.spec.method.model_dump(mode="json"),
        "optimizations": option.spec.optimizations.model_dump(mode="json", exclude_defaults=True),
        "optimizer": train.optimizer,
        "batch_size": train.batch_size, "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "seconds": asdict(seconds), "samples_per_hour": option.duration.samples_per_hour,
        "may_miss_deadline": None if goal.deadline_s is None else may_miss(option, goal),
        "memory_gb": asdict(memory.device), "total_gb": memory.total, "headroom_gb": option.headroom,
        "cost": None if option.cost is None else option.cost.value,
        "currency": None if option.cost is None else option.cost.currency,
        "way": None if option.cost is None else option.cost.way, "joules": asdict(option.joules),
        "basis": option.duration.basis, "confidence": option.duration.confidence,
        "changes_the_loss": FP8 if option.spec.optimizations.fp8 != "off" else None,
    }  # fmt: skip
