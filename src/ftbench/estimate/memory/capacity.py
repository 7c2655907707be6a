"""How much memory a GPU has, as its driver counts it, and how much of that a process can have."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ftbench.core.hardware import Gpu, limited_gpu
from ftbench.core.units import GIB, gibibytes
from ftbench.store import ceilings

RESERVE = 0.62  # GiB that the driver keeps of a GPU of which nobody said it: the most of the GPU table, and an H200's
DISPLAY = 0.5  # GiB left for a screen on cards that have sockets for one


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


def capacity(gpu: Gpu | float, total: float | None = None) -> Capacity:
    """Return the capacity of a GPU of the table, or of one of so many GiB. `total` is what its driver says, where it
    was asked; else the table's, or the data sheet's GB as 10**9 bytes, which is the careful reading."""
    if not isinstance(gpu, Gpu):
        size = total or gpu
        return Capacity(size, max(0.0, size - RESERVE))
    known = gpu.nvml_mib / 1024 if gpu.nvml_mib else gpu.memory_gb * 1e9 / GIB
    reserve = RESERVE if gpu.usable_gib is None else known - gpu.usable_gib
    return Capacity(total or known, (total or known) - reserve, DISPLAY if gpu.display else 0.0)


def probed(gpu: Gpu, store: Path | None) -> Gpu:
    """Return the GPU with what it gives processes as the store's probes measured it, where they did."""
    figures = ceilings.of(store, gpu.name) if store else {}
    if "usable_gb" not in figures:
        return gpu
    driver = figures.get("driver_total_gb")
    return replace(gpu, usable_gib=figures["usable_gb"], nvml_mib=driver * 1024 if driver else gpu.nvml_mib)


def machine_gpu(described: Mapping[str, Any], store: Path | None) -> Gpu | float:
    """Return a GPU of a machine.json as the table and the store's probes know it, else the GiB that its driver says."""
    gpu = limited_gpu(described)
    return probed(gpu, store) if gpu else float(described["memory_gb"])
