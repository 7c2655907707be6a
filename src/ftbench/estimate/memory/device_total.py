"""How much memory a GPU has, as its driver counts it."""

from __future__ import annotations

from ftbench.core.hardware import Gpu
from ftbench.core.units import GIB

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


def total_gib(gpu: Gpu) -> float:
    """GiB; of a GPU whose driver was never asked, the data sheet's GB as 10**9 bytes, which is the careful reading."""
    mib = _DRIVER_MIB.get(gpu.name)
    return gpu.memory_gb * 1e9 / GIB if mib is None else mib / 1024
