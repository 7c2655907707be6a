"""The time section of an estimate, as text and as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ftbench.core import units
from ftbench.core.hardware import Gpu
from ftbench.errors import SpecError
from ftbench.estimate.memory.estimate import Band
from ftbench.estimate.money import Amount, amount
from ftbench.estimate.time.duration import DurationEstimate, epochs_samples
from ftbench.spec.experiment import Experiment
from ftbench.spec.prices import Prices

NIGHT_H = 8.0
MOST_SAMPLES = 10**15
JOULES_PER_KWH = 3.6e6
_SHOWN = 4  # terms of a step that are named
_TERMS = {
    "products": "products", "products.fp8": "fp8 products", "products.experts": "experts' products",
    "attention.causal": "attention", "attention.masked": "masked attention", "elementwise.eager": "elementwise",
    "elementwise.compiled": "compiled elementwise", "elementwise.liger": "Liger's kernels",
    "elementwise.unsloth": "unsloth's kernels", "elementwise.float32": "the float32 stream",
    "logits.trl": "logits", "logits.chunked": "logits", "dequantise": "dequantisation",
    "dequantise.mxfp4": "writing experts out", "casts": "casts to 8 bits", "optimizer": "optimizer",
    "optimizer.fused": "optimizer", "optimizer.8bit": "optimizer",
    "offload": "offloading", "offload.checkpoints": "offloading", "experts": "experts' weights",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be told besides the step: how long `samples` take (None for those of the spec), and what `hours` are
    good for; with `prices` what it costs."""

    samples: float | None = None
    hours: float = NIGHT_H
    prices: Prices | None = None


def checked(samples: float | None, hours: float | None, prices: Prices | None) -> Question:
    """Raises SpecError for amounts that are none."""
    if samples is not None and not 1 <= samples <= MOST_SAMPLES:
        raise SpecError(f"--samples {samples:g}: how many samples to train on, from 1 to 10^15")
    if samples is not None and samples % 1:
        raise SpecError(f"--samples {samples:g}: samples are whole: ask for {math.ceil(samples)}")
    if hours is not None and not 0 < hours <= 1e6:
        raise SpecError(f"--hours {hours:g}: how long a night is, in hours, above 0")
    return Question(samples, NIGHT_H if hours is None else hours, prices)


def as_text(spec: Experiment, gpu: Gpu, found: DurationEstimate, asked: Question) -> str:
    """Aligned lines, each a label and what is known."""
    step, night = found.step_s, found.samples_in(3600 * asked.hours)
    rows = [
        ("step", f"{units.seconds(step.expected)} ({units.seconds(step.low)} to {units.seconds(step.high)}), "
                 f"{units.count(found.samples_per_hour)} samples/h"),
        ("known from", found.confidence),
        ("lengths", f"{units.rate(found.tokens / found.samples)} tokens each, {units.percent(found.padding)} padding "
                    f"({found.lengths})"),
        (f"{asked.hours:g} h", f"{units.count(night.expected)} samples ({units.count(night.low)} to "
                               f"{units.count(night.high)})"),
        *_training(spec, gpu, found, asked),
        ("power", f"{found.watts.expected:.0f} W of the GPU ({found.watts_source})"),
        ("spent on", _parts(found)),
    ]  # fmt: skip
    if found.upper_bound:
        rows.insert(3, ("", "so these times are upper bounds: a short run on this data tells its lengths"))
    return "\n".join(f"{label:<12}{text}".rstrip() for label, text in rows) + "\n"


def _training(spec: Experiment, gpu: Gpu, found: DurationEstimate, asked: Question) -> list[tuple[str, str]]:
    """Of the samples asked for, or those of the spec; nothing where neither is known."""
    samples = asked.samples or epochs_samples(spec, found.samples)
    if samples is None:
        return []
    seconds, joules = found.seconds_for(samples), found.joules_for(samples)
    rows = [
        ("training", f"{units.count(samples)} samples in {units.seconds(seconds.expected)} "
                     f"({units.seconds(seconds.low)} to {units.seconds(seconds.high)}), "
                     f"{joules.expected / JOULES_PER_KWH:.3g} kWh"),
    ]  # fmt: skip
    if (cost := cost_of(gpu, found, seconds, asked.prices)) is not None:
        rows.append(("cost", f"{cost} ({cost.way})"))
    elif asked.prices is not None:
        rows.append(("cost", f"{asked.prices.path} has no price for {gpu.name}"))
    return rows


def cost_of(gpu: Gpu, found: DurationEstimate, seconds: Band, prices: Prices | None) -> Amount | None:
    price = prices.of(gpu.name) if prices else None
    return amount(price, seconds.expected, found.watts.expected) if price else None


def _parts(found: DurationEstimate) -> str:
    if found.bound == "host":
        return "Python: the GPU waits for its kernels to be started, so a larger batch costs little"
    total = sum(found.parts.values())
    terms = sorted(found.parts.items(), key=lambda pair: -pair[1])[:_SHOWN]
    return ", ".join(f"{_TERMS[name]} {value / total:.0%}" for name, value in terms)


def as_record(spec: Experiment, gpu: Gpu, found: DurationEstimate, asked: Question) -> dict[str, Any]:
    """The `time` section of the JSON document."""
    samples = asked.samples or epochs_samples(spec, found.samples)
    seconds = None if samples is None else found.seconds_for(samples)
    cost = None if seconds is None else cost_of(gpu, found, seconds, asked.prices)
    return {
        "step_s": band(found.step_s), "samples_per_step": found.samples, "samples_per_hour": found.samples_per_hour,
        "real_tokens_per_step": found.tokens, "padding": found.padding, "start_s": found.start_s,
        "bound": found.bound, "parts_s": found.parts, "basis": found.basis, "confidence": found.confidence,
        "lengths": found.lengths, "upper_bound": found.upper_bound,
        "hours": asked.hours, "samples_in_hours": band(found.samples_in(3600 * asked.hours)),
        "samples": samples, "training_s": None if seconds is None else band(seconds),
        "joules": None if samples is None else band(found.joules_for(samples)),
        "watts": band(found.watts), "watts_source": found.watts_source,
        "cost": None if cost is None else {"value": cost.value, "currency": cost.currency, "way": cost.way},
    }  # fmt: skip


def band(found: Band) -> dict[str, float]:
    return {"low": found.low, "expected": found.expected, "high": found.high}
