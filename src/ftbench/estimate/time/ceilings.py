"""What a GPU can do at the most: by a probe in the store where there is one, else by what was published, else by its
data sheet."""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ftbench.core.hardware import Gpu, gpus
from ftbench.errors import SpecError
from ftbench.store import ceilings as probes

# Shares of the data sheet that large products and copies reach where nobody measured this GPU or one of its kind: the
# medians of the GPU table's `gemm_bf16` over `bf16` (0.83), and of triad over data sheet bandwidth as usually
# published (0.9).
_PRODUCTS, _MEMORY = 0.83, 0.9
# NCCL, src/graph/topo.h: 20.6 of 25 GB/s a link of an H100, 20 of 25 of an A100, 24 of 31.5 of PCIe 4.0
_NCCL_SHARE = 0.8
_LINK_GBS = 50.0  # PCIe 5.0 x16, pinned memory: 63 GB/s by its data sheet
_OLDER_LINK_GBS, _PCIE_5 = 25.0, (9, 0)  # PCIe 4.0 x16 of Ampere and Ada: 31.5 GB/s
# A board that is held to less power runs at a lower clock and a lower voltage: its rate falls as this power of the
# watts. GPUs of one kind in the GPU table, by watts for each TFLOP/s of their data sheet: 0.47 between H100 PCIe and
# SXM5, 0.49 between L4 and L40S.
_POWER_EXPONENT = 0.5
# Watts for each GB/s at which moving bytes alone takes a board to its limit: an H200 does (700 W, 4,800 GB/s; eager
# runs of results/h200, half of whose step moves bytes, draw 0.99 of it).
_WATTS_A_GBS = 700 / 4800


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates in FLOP/s and bytes/s; None where no source is known, `network` (between GPUs of this kind) 0. `link` is to
    the host, `from_host` the other way. `source` in words."""

    products: float | None
    products_fp8: float | None
    memory: float
    link: float
    from_host: float
    source: str
    network: float = 0.0


def ceilings(gpu: Gpu, precision: str, store: Path | None = None) -> Ceilings:
    """Return what a GPU can do; `precision` is the spec's `train.precision`: bf16, fp16 or fp32."""
    probed = probes.of(store, gpu.name) if store else {}
    rates = probed.get("tflops", {})
    fp8, sheet = rates.get("fp8"), gpu.peak_tflops(precision)
    rate, source = rates.get(precision), "ceilings measured by `ftbench probe`"
    if rate is None and sheet is not None:
        rate, source = gpu.gemm_bf16, "ceilings published for this GPU"
        if rate is None:
            rate, source = sheet * _share_of_sheet(_board(gpu)), "ceilings from the data sheet and the board's power"
        rate *= _slowed(gpu.watts / _board(gpu).watts)
    if fp8 is None and gpu.fp8 is not None:
        fp8 = gpu.fp8 * (rate / sheet if rate and sheet else _PRODUCTS)
    return Ceilings(
        None if rate is None else rate * 1e12,
        None if fp8 is None else fp8 * 1e12,
        probed.get("memory_gbs", gpu.bandwidth * _MEMORY * _slowed(gpu.watts / gpu.bandwidth / _WATTS_A_GBS)) * 1e9,
        probed.get("to_host_gbs", _LINK_GBS) * 1e9,
        probed.get("to_device_gbs", _LINK_GBS if (gpu.compute_capability or (0, 0)) >= _PCIE_5 else _OLDER_LINK_GBS)
        * 1e9,
        source,
        (probed.get("network_gbs") or _network(gpu)) * 1e9,
    )


def _network(gpu: Gpu) -> float:
    """Return GB/s between two GPUs of this kind: of the data sheet's what NCCL itself reckons with; half of that where
    the driver does not let one read the other's memory, so that every byte goes through the host's."""
    return (gpu.link or 0.0) * _NCCL_SHARE * (1.0 if gpu.peer_access else 0.5)


def _share_of_sheet(gpu: Gpu) -> float:
    """Return the share of its data sheet that a GPU reaches in large products: that of the GPU of its kind whose board
    has the most alike power for it, less what the difference in power takes."""
    measured = [other for other in gpus() if other.gemm_bf16 and other.bf16 and other.arch == gpu.arch]
    kind = [other for other in measured if other.compute_capability == gpu.compute_capability] or measured
    if not kind:
        return _PRODUCTS
    nearest = min(kind, key=lambda other: abs(math.log(_watts_a_tflops(other) / _watts_a_tflops(gpu))))
    assert nearest.gemm_bf16 is not None
    assert nearest.bf16 is not None
    return nearest.gemm_bf16 / nearest.bf16 * _slowed(_watts_a_tflops(gpu) / _watts_a_tflops(nearest))


def _slowed(power: float) -> float:
    """Return the share of its rate that a board keeps with so large a share of the watts that it would draw."""
    return float(min(1.0, power) ** _POWER_EXPONENT)


def _board(gpu: Gpu) -> Gpu:
    """Return the GPU with all the watts of its board, whatever its machine holds it to."""
    return next((row for row in gpus() if row.name == gpu.name), gpu)


def _watts_a_tflops(gpu: Gpu) -> float:
    assert gpu.bf16 is not None
    return gpu.watts / gpu.bf16


@lru_cache(maxsize=256)
def limits_of(gpu: Gpu, precision: str, fp8: bool, store: Path | None) -> Ceilings:
    """Return the ceilings of a GPU that a spec asks for. Raise SpecError where they are not known."""
    limits = ceilings(gpu, precision, store)
    if limits.products is None:
        raise SpecError(
            f"how fast {gpu.name} multiplies in {precision} is not known: run `ftbench probe` on it, and give its "
            "folder with --store"
        )
    if fp8 and limits.products_fp8 is None:
        raise SpecError(f"{gpu.name} has no fp8 products: set optimizations.fp8 to off")
    return limits
