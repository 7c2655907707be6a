"""Format the answer of `ftbench recommend` as text, as JSON and as a YAML spec."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

from ftbench.core import units
from ftbench.core.table import folded, folded_command, text_table
from ftbench.estimate.memory.estimate import HOST
from ftbench.estimate.recommend.ranking import Goal, Option, Recommendation, as_runnable, may_miss
from ftbench.estimate.recommend.spec_file import spec_file, spec_values, variant_words
from ftbench.estimate.text import AMD, GENERATED, LAUNCH_BOUND, LIMITS
from ftbench.spec.experiment import Experiment

FP8 = "fp8 multiplies in 8 bits: check with `ftbench parity` that the recipe learns the same"


def as_text(answer: Recommendation, command: str = "", every: bool = False) -> str:
    """Return a table of the best variant per GPU, a sentence about the best variant, `command`, and notes.

    With `every`, the table contains all variants. A second table counts the rejected variants by reason."""
    goal = answer.goal
    lines = [folded(" · ".join(_question(goal))), ""]
    if answer.options:
        per_gpu = answer.best_per_gpu()
        lines += [_table(answer.options if every else per_gpu, goal), "", folded(_answer(answer.options[0], goal))]
        lines += [folded_command(command)] if command else []
        lines += ["", *map(folded, _notes(answer))]
        if not every and (more := len(answer.options) - len(per_gpu)):
            lines.append(folded(f"--all lists {units.some(more, 'more variant')} within the limits"))
    else:
        names = units.listed([gpu.name for gpu in goal.gpus], 3)
        missed = f"no variant meets these limits. The closest is {answer.missed}:"
        lines.append(folded(missed if answer.closest else f"no training variant fits {names}"))
        lines += ["", _table([answer.closest], goal)] if answer.closest else []
    if answer.ruled_out and (every or not answer.options):
        rows = [("", units.count(count), reason) for reason, count in answer.ruled_out.items()]
        lines += ["", f"rejected, of {units.some(answer.considered, 'variant')}:", text_table(["", ">", ""], rows)]
    return "\n".join(lines) + "\n"


def _question(goal: Goal) -> list[str]:
    lengths = goal.history.lengths(goal.spec)
    parts = [goal.spec.model.id, units.some(round(goal.samples), "sample")]
    parts.append(f"mean {units.rate(lengths.mean)} tokens ({lengths.source})")
    parts += [f"{units.some(goal.effective_batch, 'sample')} per step"] if goal.effective_batch else []
    parts += [f"deadline {units.seconds(goal.deadline_s)}"] if goal.deadline_s else []
    parts += [f"at most {goal.max_cost:g}"] if goal.max_cost is not None else []
    return [*parts, f"best by {goal.objective}"]


def _answer(best: Option, goal: Goal) -> str:
    step = f" ({best.duration.samples:.0f} samples per step)" if best.spec.optimizations.packing else ""
    cost = "" if best.cost is None else f", {best.cost} ({best.cost.way})"
    memory = f"{units.gibibytes(best.memory.device.expected)} of {units.gibibytes(best.memory.total)} GiB"
    parts = [f"{_range(best)}{cost}", _energy(best, goal), memory]
    return (
        f"Best: {variant_words(best.spec)}, batch {_batch(best.spec)}{step}, on {best.location}: "
        f"{', '.join(filter(None, parts))}."
    )


def _energy(option: Option, goal: Goal) -> str:
    return f"{option.joules.expected / units.JOULES_PER_KWH:.3g} kWh" if goal.objective == "energy" else ""


def _table(options: Sequence[Option], goal: Goal) -> str:
    """Return a table with one row per variant. Empty columns, and columns beyond the terminal width, are hidden."""
    headings = ["GPU", "recipe", ">batch", ">time", ">cost", ">energy", ">GiB", "deadline", ">range", "known from",
                "limited by"]  # fmt: skip
    rows = [_row(option, goal) for option in options]
    kept = [at for at in range(len(headings)) if any(row[at] for row in rows)]
    return text_table([headings[at] for at in kept], [[row[at] for at in kept] for row in rows])


def _row(option: Option, goal: Goal) -> list[str]:
    seconds = option.seconds
    return [
        option.location, variant_words(option.spec), _batch(option.spec), units.seconds(seconds.expected),
        str(option.cost or ("no price" if goal.prices else "")), _energy(option, goal),
        units.gibibytes(option.memory.device.expected),
        _deadline(option, goal), f"{units.seconds(seconds.low)} to {units.seconds(seconds.high)}",
        option.duration.basis, LIMITS.get(option.duration.bound, ""),
    ]  # fmt: skip


def _range(option: Option) -> str:
    low, expected, high = map(units.seconds, astuple(option.seconds))
    return f"{expected} ({low} to {high})"


def _batch(spec: Experiment) -> str:
    """Return the batch size as text: `8`, or `8 x 4` with 4 gradient accumulation steps."""
    size, passes = spec.train.batch_size, spec.train.gradient_accumulation_steps
    return str(size) if passes == 1 else f"{size} x {passes}"


def _deadline(option: Option, goal: Goal) -> str:
    if goal.deadline_s is None:
        return ""
    if option.seconds.expected > goal.deadline_s:
        return "misses"
    return "may miss" if may_miss(option, goal) else "keeps"


def _notes(answer: Recommendation) -> list[str]:
    """Return the notes below the table, for example about the deadline and about sample lengths."""
    best, goal, per_gpu = answer.options[0], answer.goal, answer.best_per_gpu()
    lines = [f"basis of the time: {best.duration.confidence}", *_other_lengths(answer)]
    hosts = [(option.memory.host, option.location) for option in per_gpu if option.memory.host > HOST]
    needed = units.listed([f"{units.gibibytes(size)} GiB on {where}" for size, where in hosts], 5)
    lines += [f"host memory: about {needed}"] if hosts else []
    lines += [GENERATED] if goal.spec.dataset.is_generated and best.gpu.compute_capability else []
    lines += [AMD] if best.gpu.compute_capability is None else []
    lines += [LAUNCH_BOUND] if any(option.duration.bound == "host" for option in per_gpu) else []
    if without := [gpu.name for gpu in goal.gpus if gpu not in {option.gpu for option in per_gpu}]:
        lines.append(f"no variant is possible or within the limits on {units.listed(without, 5)}: see --all")
    if goal.deadline_s:
        most, own = best.duration.samples_in(goal.deadline_s), goal.spec.dataset.samples
        passes = f", {units.some(round(most.expected / own), 'pass')} over the data set" if own else ""
        lines.append(
            f"in {units.seconds(goal.deadline_s)} the best variant trains {units.count(most.expected)} samples "
            f"({units.count(most.low)} to {units.count(most.high)}){passes}"
        )
    if best.duration.upper_bound:
        lines.append("times are upper bounds: run a few steps on this data, and repeat this command")
    lines += [FP8] if any(option.spec.optimizations.fp8 != "off" for option in per_gpu) else []
    if len({option.spec.method.quantised for option in per_gpu} | {goal.spec.method.quantised}) > 1:
        lines.append("4-bit weights can change what the model learns: compare the loss before a long run")
    if goal.spec.train.max_grad_norm and not best.spec.train.max_grad_norm:
        lines.append("the best settings do not clip gradients: compare the loss before a long run")
    if goal.effective_batch is None:
        lines.append("rows train different numbers of samples per step and learn differently: use --effective-batch N")
    return lines


def _other_lengths(answer: Recommendation) -> list[str]:
    """Return a note that names the best variants for half and for twice the mean sample length."""
    if not answer.lengths:
        return []
    best, mean = answer.options[0], answer.goal.history.lengths(answer.goal.spec).mean
    where, texts = f" on {best.gpu.name}" if len(answer.goal.gpus) > 1 else "", []
    for factor, option in answer.lengths:
        at = f"at {'half' if factor < 1 else 'twice'} the mean length ({units.rate(factor * mean)} tokens)"
        if option is None:
            texts.append(f"no variant meets the limits {at}{where}")
        elif _identity(option) != _identity(best):
            texts.append(f"{at} the best{where} is {variant_words(option.spec)}, batch {_batch(option.spec)}")
    return ["; ".join(texts) if texts else f"the same variant is best{where} at half and at twice the mean length"]


def _identity(option: Option) -> tuple[object, ...]:
    return option.location, variant_words(option.spec), _batch(option.spec)


def as_yaml(answer: Recommendation) -> str:
    """Return the spec of the best variant as YAML. Comments at the top show the estimated time and memory."""
    best, goal = answer.options[0], answer.goal
    lines = [
        f"# The best by {goal.objective} for {units.some(round(goal.samples), 'sample')} on {best.location}, according "
        "to ftbench recommend.",
        f"# Expected: {_range(best)}, {units.gibibytes(best.memory.device.expected)} of "
        f"{units.gibibytes(best.memory.total)} GiB.",
        textwrap.fill(f"# Known from: {best.duration.confidence}.", 110, subsequent_indent="# "),
    ]  # fmt: skip
    return "\n".join(lines) + "\n" + spec_file(as_runnable(best, goal))


def as_json(answer: Recommendation) -> dict[str, Any]:
    """Return the JSON document: variants (best first), counts of rejected variants by reason, and the best spec."""
    goal = answer.goal
    return {
        "model": goal.spec.model.id, "samples": goal.samples, "deadline_s": goal.deadline_s,
        "max_cost": goal.max_cost, "objective": goal.objective,
        "options": [_record(option, goal) for option in answer.options],
        "closest": None if answer.closest is None else _record(answer.closest, goal),
        "missed": answer.missed or None, "ruled_out": answer.ruled_out, "weighed": answer.considered,
        "spec": spec_values(as_runnable(answer.options[0], goal)) if answer.options else None,
    }  # fmt: skip


def _record(option: Option, goal: Goal) -> dict[str, Any]:
    train, launch, seconds, memory = option.spec.train, option.spec.launch, option.seconds, option.memory
    return {
        "gpu": option.gpu.name, "gpus": launch.gpus, "strategy": launch.strategy, "offload": launch.offload,
        "method": option.spec.method.model_dump(mode="json"),
        "optimizations": option.spec.optimizations.model_dump(mode="json", exclude_defaults=True),
        "optimizer": train.optimizer, "recipe": variant_words(option.spec),
        "batch_size": train.batch_size, "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "seconds": asdict(seconds), "samples_per_hour": option.duration.samples_per_hour,
        "may_miss_deadline": None if goal.deadline_s is None else may_miss(option, goal),
        "memory_gb": asdict(memory.device), "total_gb": memory.total,
        "headroom_gb": memory.total - memory.device.expected,
        "cost": None if option.cost is None else option.cost.value,
        "currency": None if option.cost is None else option.cost.currency,
        "way": None if option.cost is None else option.cost.way, "joules": asdict(option.joules),
        "basis": option.duration.basis, "confidence": option.duration.confidence,
        "changes_the_loss": FP8 if option.spec.optimizations.fp8 != "off" else None,
    }  # fmt: skip
