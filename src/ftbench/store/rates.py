"""Compute FLOP rates, token rates and energy of the steps after warm-up, and the rewards of dpo and grpo."""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from ftbench.core import flops
from ftbench.core.rows import StepRow
from ftbench.core.stats import total
from ftbench.store.rundir import gpus_of

PARTS = ("generation", "scoring", "forward_backward", "optimizer")  # parts of a step with generation
_Shape = TypeVar("_Shape", flops.MatmulShape, flops.VisionMatmulShape)


def tflops(steady: Sequence[StepRow], config: dict[str, Any], dataset: dict[str, Any]) -> tuple[float, float] | None:
    """Return (model TFLOP/s, hardware TFLOP/s). Only hardware TFLOP/s include recomputation and padding.

    Return None if a count is unknown. The FLOPs of generation (grpo) are always unknown.
    """
    if config.get("generation"):
        return None
    shape = _shape(config, "matmul_shape", flops.MatmulShape)
    length = dataset.get("tokens", {}).get("weighted_mean")
    window = total(row.step_time_s for row in steady)
    if shape is None or not length or not window or any(None in (row.real_tokens, row.label_tokens) for row in steady):
        return None
    real, labels = total(row.real_tokens for row in steady), total(row.label_tokens for row in steady)
    model = flops.model_flops(shape, real, labels, length)
    computed = sum(_computed(shape, row, config) for row in steady)
    seeing = _of_images(steady, config, dataset)
    if (config.get("reference") or {}).get("in_step"):
        model += flops.forward_flops(shape, real, labels, length)
        positions = [(row.padded_tokens or 0, row.longest_sequence or 0) for row in steady]
        computed += sum(flops.forward_flops(shape, count, count, longest) for count, longest in positions)
    return (model + seeing[0]) / window / 1e12, (computed + seeing[1]) / window / 1e12


def _of_images(steady: Sequence[StepRow], config: dict[str, Any], dataset: dict[str, Any]) -> tuple[float, float]:
    """Return the FLOPs of vision encoder and projector in the steady steps, without and with recomputation."""
    shape = _shape(config, "vision_shape", flops.VisionMatmulShape)
    patches = total(row.image_patches for row in steady)
    length = dataset.get("images", {}).get("patches", {}).get("weighted_mean")
    if shape is None or not patches or not length:
        return 0.0, 0.0
    again = float(config.get("gradient_checkpointing") or 0.0)
    return patches * flops.vision_per_patch(shape, length), patches * flops.vision_per_patch(shape, length, again)


def _computed(shape: flops.MatmulShape, row: StepRow, config: dict[str, Any]) -> float:
    """Return the hardware FLOPs of a step. A chunked loss computes the logits of label tokens only.

    The chunked loss of trl and the loss `chunked` of early ftbench versions compute these logits twice.
    """
    loss = str(config.get("loss"))
    chunked = loss.startswith("chunked")
    positions = row.padded_tokens or 0
    return flops.hardware_flops(
        shape,
        positions,
        (row.label_tokens or 0) if "chunk" in loss else positions,
        row.longest_sequence or 0,
        recompute=float(config.get("gradient_checkpointing") or 0.0),
        head_recompute=chunked,
    )


def _shape(config: dict[str, Any], key: str, kind: type[_Shape]) -> _Shape | None:
    values: dict[str, Any] = config.get(key) or {}
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    if len(set(map(len, lists.values()))) > 1:  # they have one value per layer
        return None
    try:
        return kind(**(values | lists))
    except TypeError:  # missing, or written by another version
        return None


def energy(steady: Sequence[StepRow], machine: dict[str, Any]) -> tuple[dict[str, float | None], list[str]]:
    """Return the energy figures of the GPUs (without the host), and a list of warnings.

    `joules` comes from the driver's energy counters, and is None if a short window leaves the counters unchanged.
    `mean_watts` is the mean of power samples, weighted by step time. The list has a warning if both differ by 10 %."""
    counted = [row for row in steady if row.energy_j is not None]
    joules = sum(row.energy_j or 0.0 for row in counted) or None
    samples = total(row.samples for row in counted)
    powered = [row for row in steady if row.power_w is not None]
    seconds = total(row.step_time_s for row in powered)
    watts = total((row.power_w or 0) * (row.step_time_s or 0) for row in powered) / seconds if seconds else None
    idle = [gpu.get("idle_power_w") for gpu in gpus_of(machine)]
    figures = {
        "joules": joules,
        "joules_per_1k_samples": joules / samples * 1000 if joules is not None and samples else None,
        "mean_watts": watts,
        "idle_watts": sum(each or 0.0 for each in idle) if idle and None not in idle else None,
    }
    if joules and watts and abs(joules / (watts * seconds) - 1) > 0.1 and seconds >= 30:
        return figures, [
            f"energy: the counter's {joules:,.0f} J and the sampled {watts * seconds:,.0f} J differ by more than 10 %"
        ]
    return figures, []


def completion_rates(steady: Sequence[StepRow]) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Return the mean seconds of each part of a step, and two rates in tokens/s.

    `generated` is generated tokens / generation time. `trained` is real tokens (with prompts) / time of the forward
    pass, the backward pass and the optimizer.
    """
    spent = {part: total(getattr(row, f"{part}_s") for row in steady) for part in PARTS}
    counts = {
        "generated": (total(row.generated_tokens for row in steady), spent["generation"]),
        "trained": (total(row.real_tokens for row in steady), spent["forward_backward"] + spent["optimizer"]),
    }
    rates: dict[str, float | None] = {
        name: tokens / seconds for name, (tokens, seconds) in counts.items() if seconds > 0
    }
    return {part: seconds / len(steady) for part, seconds in spent.items()}, rates


def rewards(everything: Sequence[StepRow]) -> dict[str, float | None]:
    """Return the last finite `reward_accuracy` and `reward_margin` (dpo), `reward_first` and `reward_last` (grpo)."""
    train = [row for row in everything if row.phase == "train"]
    pairs = [row for row in train if row.reward_margin is not None and math.isfinite(row.reward_margin)]
    judged = [row.reward for row in train if row.reward is not None and math.isfinite(row.reward)]
    figures = {name: getattr(pairs[-1], name) for name in ("reward_accuracy", "reward_margin")} if pairs else {}
    return figures | ({"reward_first": judged[0], "reward_last": judged[-1]} if judged else {})
