"""How much memory a GPU has, as its driver counts it, and how much of that a process can have."""

from __future__ import annotations

from dataclasses import dataclass

from ftbench.core.hardware import Gpu
from ftbench.core.units import GIB, gibibytes

# What nvidia-smi reports as the total, MiB. "80 GB" on a card is neither 80 * 10**9 bytes nor 80 GiB.
# Sources: this project's runs (H200 SXM); public nvidia-smi outputs for the others.
_DRIVER_MIB = {
    "H200 SXM": 143771,
    "H200 NVL": 143771,
    "H100 SXM5": 81559,
    "H100 PCIe": 81559,
    "H100 NVL": 95830,
    "A100 80GB": 81920,
    "A100 40GB": 40960,
    "L40S": 46068,
    "L4": 23034,
    "RTX PRO 6000 Blackwell Max-Q": 97887,
    "RTX PRO 6000 Blackwell Server": 97887,
    "RTX PRO 6000 Blackwell Workstation": 97887,
    "RTX 5090": 32607,
    "RTX 4090": 24564,
    "B200": 183359,
}
# What CUDA gives processes of it in all (cudaMemGetInfo), GiB: the capacity that torch names as it runs out of memory.
# Sources, public error messages: pinokiofactory/flux-webui#11 and 3DTopia/Phidias-Diffusion#8 (RTX 4090, 23.61 and
# 23.64), Wan-Video/Wan2.1#465 (RTX 5090), stepfun-ai/Step-Video-T2V#8 and Wan-Video/Wan2.1#205 (L40S, 44.42 and 44.53);
# antirez/ds4#431 (RTX PRO 6000).
_USABLE_GIB = {
    "L40S": 44.42,
    "RTX PRO 6000 Blackwell Max-Q": 94.97,
    "RTX PRO 6000 Blackwell Server": 94.97,
    "RTX PRO 6000 Blackwell Workstation": 94.97,
    "RTX 5090": 31.37,
    "RTX 4090": 23.61,
}
RESERVE = 0.62  # GiB that the driver keeps of a GPU of which nobody said it: the most of those above, and an H200's
DISPLAY = 0.5  # GiB left for a screen on cards that have sockets for one
_WITH_DISPLAY = ("GeForce", "RTX ", "DGX Spark")
_WITHOUT = ("RTX PRO 6000 Blackwell Server",)


@dataclass(frozen=True, slots=True)
class Capacity:
    """GiB. `total` as the driver counts it (NVML, nvidia-smi), `usable` by processes, `margin` of that is left free."""

    total: float
    usable: float
    margin: float = 0.0

    @property
    def words(self) -> str:
        """Both counts and the margin, for people."""
        kept = f", less {gibibytes(self.margin)} for a display" if self.margin else ""
        return f"{gibibytes(self.total)} GiB as its driver counts (NVML), {gibibytes(self.usable)} for a process{kept}"


def total_gib(gpu: Gpu) -> float:
    """Return GiB; of a GPU whose driver was never asked, the data sheet's GB as 10**9 bytes, which is the careful
    reading."""
    mib = _DRIVER_MIB.get(gpu.name)
    return gpu.memory_gb * 1e9 / GIB if mib is None else mib / 1024


def capacity(gpu: Gpu | float, total: float | None = None) -> Capacity:
    """Return the capacity of a GPU of the table, or of one of so many GiB. `total` is what its driver says, where it
    was asked."""
    if not isinstance(gpu, Gpu):
        size = total or gpu
        return Capacity(size, max(0.0, size - RESERVE))
    known = total_gib(gpu)
    reserve = known - _USABLE_GIB.get(gpu.name, known - RESERVE)
    shown = gpu.name.startswith(_WITH_DISPLAY) and gpu.name not in _WITHOUT
    return Capacity(total or known, (total or known) - reserve, DISPLAY if shown else 0.0)
