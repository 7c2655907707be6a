"""What a GPU can do at the most: by a probe in the store where there is one, else by what was published, else by its
data sheet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ftbench.core.hardware import Gpu, canonical_name
from ftbench.errors import SpecError
from ftbench.store import ceilings as probes

# Shares of the data sheet that large products and copies reach where nobody measured this GPU: the medians of the GPU
# table's `gemm_bf16` over `bf16` (0.83), and of triad over data sheet bandwidth as usually published (0.9).
_PRODUCTS, _MEMORY = 0.83, 0.9
_LINK_GBS = 50.0  # PCIe 5.0 x16, pinned memory: 63 GB/s by its data sheet


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates in FLOP/s and bytes/s; None where no source is known. `source` in words."""

    products: float | None
    products_fp8: float | None
    memory: float
    link: float
    source: str


def ceilings(gpu: Gpu, precision: str, store: Path | None = None) -> Ceilings:
    """`precision` is the spec's `train.precision`: bf16, fp16 or fp32."""
    found = _probed(store, gpu) if store else {}
    rates = found.get("tflops", {})
    fp8, sheet = rates.get("fp8"), gpu.peak_tflops(precision)
    rate, source = rates.get(precision), "ceilings measured by `ftbench probe`"
    if rate is None and sheet is not None:
        rate, source = gpu.gemm_bf16, "ceilings published for this GPU"
        if rate is None:
            rate, source = sheet * _PRODUCTS, "ceilings from the data sheet"
    if fp8 is None and gpu.fp8 is not None:
        fp8 = gpu.fp8 * (rate / sheet if rate and sheet else _PRODUCTS)
    return Ceilings(
        None if rate is None else rate * 1e12,
        None if fp8 is None else fp8 * 1e12,
        found.get("memory_gbs", gpu.bandwidth * _MEMORY) * 1e9,
        found.get("to_host_gbs", _LINK_GBS) * 1e9,
        source,
    )


@lru_cache(maxsize=256)
def limits_of(gpu: Gpu, precision: str, fp8: bool, store: Path | None) -> Ceilings:
    """The ceilings of a GPU that a spec asks for. Raises SpecError where they are not known."""
    limits = ceilings(gpu, precision, store)
    if limits.products is None:
        raise SpecError(
            f"how fast {gpu.name} multiplies in {precision} is not known: run `ftbench probe` on it, and give its "
            "folder with --store"
        )
    if fp8 and limits.products_fp8 is None:
        raise SpecError(f"{gpu.name} has no fp8 products: set optimizations.fp8 to off")
    return limits


def _probed(store: Path, gpu: Gpu) -> dict[str, Any]:
    """What probes say of a GPU, under all the names that the table takes for one."""
    return probes.of(store, *(name for name in probes.gpus(store) if canonical_name(name) == gpu.name))
