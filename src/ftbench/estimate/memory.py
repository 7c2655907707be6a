"""The memory a spec needs on a GPU: allocated, reserved and device, by part, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ftbench.core.architectures import architectures, parameter_count
from ftbench.core.hardware import Gpu
from ftbench.errors import SpecError
from ftbench.spec.experiment import Experiment

Verdict = Literal["fits", "uncertain", "does not fit"]
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Band:
    """A quantity in GiB with the range in which it is expected."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """`parts` are the tensors alive at the peak, GiB by name; they add up to `allocated.expected`. `total` is what the
    GPU has, GiB; `verdict` compares the band of `device` with it."""

    allocated: Band
    reserved: Band
    device: Band
    peak_phase: str
    peak_term: str
    total: float
    verdict: Verdict
    parts: dict[str, float] = field(default_factory=dict)


def estimate_memory(
    spec: Experiment, gpu: Gpu | float, *, config: dict[str, Any] | None = None, gpus: int = 1, strategy: str = "none"
) -> MemoryEstimate:
    """The memory of one GPU, the table's or one of so many GiB. `config` is the model's config.json where facts do not
    know it. Raises SpecError for a model whose shape is not known."""
    total = gpu.memory_gb * 1e9 / GIB if isinstance(gpu, Gpu) else gpu
    shape = config or architectures().get(spec.model.id)
    if shape is None:
        raise SpecError(f"no shape is known for {spec.model.id}: give --config with its config.json")
    count = sum(parameter_count(shape).values())
    full = spec.method.name == "full"
    weights = count * (0.7 if spec.method.quantised else 2)
    trained = count * 6 if full else count * 0.01 * 12
    tokens = spec.train.batch_size * spec.dataset.max_length
    activations = tokens * shape["num_hidden_layers"] * shape["hidden_size"] * 34
    parts = {"weights": weights / GIB, "trained": trained / GIB, "activations": activations / GIB}
    peak = sum(parts.values())
    device = Band(peak * 0.9 + 1, peak + 2, peak * 1.1 + 2)
    verdict: Verdict = "fits" if device.high <= total else "does not fit" if device.low > total else "uncertain"
    allocated, reserved = Band(peak * 0.9, peak, peak * 1.1), Band(peak * 0.9, peak + 0.5, peak * 1.1)
    return MemoryEstimate(allocated, reserved, device, "backward", "activations", total, verdict, parts)


def largest_batch(spec: Experiment, gpu: Gpu | float, **options: Any) -> int | None:
    """The largest train.batch_size whose verdict is `fits`; None where not even one does."""

    def fits(batch: int) -> bool:
        train = spec.train.model_copy(update={"batch_size": batch})
        return estimate_memory(spec.model_copy(update={"train": train}), gpu, **options).verdict == "fits"

    if not fits(1):
        return None
    low, high = 1, 2
    while high <= 65536 and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
