"""Measure the best and the sustained rate of large matrix products by data type.

Inputs are random, because products of zeros need less power and are faster than in training.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ftbench.worker.measure.meters import Clock
from ftbench.worker.measure.sampler import Sampler
from ftbench.worker.probe.timing import MINIMUM_BATCHES, Budget, Call, best, during, first_call, lasting, watching

Operands = Callable[[int, torch.device], Call]


def _floats(dtype: torch.dtype) -> Operands:
    def make(size: int, device: torch.device) -> Call:
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(left)
        return lambda: torch.mm(left, right, out=out)

    return make


def _fp8(size: int, device: torch.device) -> Call:
    """Return an E4M3 product with one scale per tensor and fast accumulation, like the forward product of torchao's
    tensorwise recipe. cuBLAS requires a column-major right matrix."""
    left, right = (
        torch.randn(size, size, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn) for _ in range(2)
    )
    unit = torch.ones((), device=device, dtype=torch.float32)
    turned = right.t()
    return lambda: torch._scaled_mm(left, turned, unit, unit, out_dtype=torch.bfloat16, use_fast_accum=True)


def _int8(size: int, device: torch.device) -> Call:
    """Return a product of 8-bit integers with 32-bit sums and a column-major right matrix."""
    left, right = (torch.randint(-127, 128, (size, size), device=device, dtype=torch.int8) for _ in range(2))
    turned = right.t()
    return lambda: torch._int_mm(left, turned)


@dataclass(frozen=True, slots=True)
class Kind:
    """A data type: its operands, the minimum compute capability, and torch's precision of float32 products."""

    operands: Operands
    capability: tuple[int, int] = (0, 0)
    float32: str = "highest"


# Capabilities: CUDA C++ programming guide, "Arithmetic instructions" and tensor core types by compute capability.
KINDS = {
    "bf16": Kind(_floats(torch.bfloat16), (8, 0)),
    "fp16": Kind(_floats(torch.float16), (7, 0)),
    "tf32": Kind(_floats(torch.float32), (8, 0), "high"),
    "fp32": Kind(_floats(torch.float32)),
    "fp8": Kind(_fp8, (8, 9)),
    "int8": Kind(_int8, (7, 5)),
}
ON_CPU = ("bf16", "fp32")
SIZES = {"cuda": (4096, 8192, 16384), "cpu": (512, 1024, 2048)}
BEST_S = 0.6  # per size
LASTING_S = 2.5
# Maximum bytes per element: both matrices, the product, and 16-bit originals of fp8 operands.
ELEMENT_BYTES = 12


class Unsupported(Exception):
    """This device does not support a data type."""


def supported(name: str, device: torch.device) -> None:
    """Raise Unsupported for a data type that this GPU does not support."""
    if device.type == "cpu":
        return
    have, need = torch.cuda.get_device_capability(device), KINDS[name].capability
    if have < need:
        raise Unsupported(f"needs compute capability {need[0]}.{need[1]}, but this GPU has {have[0]}.{have[1]}")


def measure(
    name: str, device: torch.device, clock: Clock, sampler: Sampler | None, budget: Budget, memory: float
) -> dict[str, Any]:
    """Return the rates of one data type in TFLOP/s, with at most `memory` bytes for operands. Raise Unsupported, or
    RuntimeError if the library does not support it."""
    supported(name, device)
    kind = KINDS[name]
    sizes: list[dict[str, Any]] = []
    torch.set_float32_matmul_precision(kind.float32)
    estimate = 0.0
    for size in SIZES[device.type]:
        # The next product takes about eight times as long.
        too_slow = estimate * 8 * (MINIMUM_BATCHES + 2) > min(BEST_S * 8, budget.left() - LASTING_S)
        if sizes and (too_slow or size * size * ELEMENT_BYTES > memory):
            break
        call = kind.operands(size, device)
        estimate = best(call, clock, BEST_S, first_call(call, clock))
        sizes.append({"size": size, "tflops": tflops(size, estimate)})
        del call  # frees memory for the next, larger matrices
    top = max(sizes, key=lambda rate: rate["tflops"])
    return {
        "best_tflops": top["tflops"],
        "best_size": top["size"],
        "sizes": sizes,
        **_lasting(kind, top["size"], device, clock, sampler),
    }


def _lasting(kind: Kind, size: int, device: torch.device, clock: Clock, sampler: Sampler | None) -> dict[str, Any]:
    call = kind.operands(size, device)
    estimate = first_call(call, clock)
    with watching(sampler):
        rate = lasting(call, clock, LASTING_S, estimate)
    return {
        "sustained_tflops": tflops(size, rate.seconds),
        "sustained_s": rate.end - rate.begin,
        **during(sampler, rate.begin, rate.end),
    }


def tflops(size: int, seconds: float) -> float:
    """Return TFLOP/s of a product of two square matrices: 2 * size**3 FLOPs."""
    return 2 * size**3 / seconds / 1e12
