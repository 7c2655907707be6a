"""The memory of a GPU as its driver counts it, and the part that a process can use."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ftbench.core.hardware import Gpu, limited_gpu
from ftbench.core.units import GIB, gibibytes
from ftbench.store import machine

RESERVE = 0.62  # GiB that the driver keeps, if unknown: the maximum of the GPU table, and an H200's
DISPLAY = 0.5  # GiB left for a display on cards with display outputs


@dataclass(frozen=True, slots=True)
class Capacity:
    """GiB of a GPU: `total` as its driver counts (NVML, nvidia-smi), `usable` by processes, and the `margin` to leave
    free."""

    total: float
    usable: float
    margin: float = 0.0

    @property
    def words(self) -> str:
        """The three numbers as text."""
        kept = f", less {gibibytes(self.margin)} for a display" if self.margin else ""
        return f"{gibibytes(self.total)} GiB by its driver (NVML), {gibibytes(self.usable)} for a process{kept}"


def capacity(gpu: Gpu | float, total: float | None = None) -> Capacity:
    """Return the capacity of a GPU of the table, or of one with so many GiB.

    `total` is the driver's number, if known. Otherwise it is the table's, or the data sheet's GB as 10**9 bytes, the
    lower reading."""
    if not isinstance(gpu, Gpu):
        size = total or gpu
        return Capacity(size, max(0.0, size - RESERVE))
    known = gpu.nvml_mib / 1024 if gpu.nvml_mib else gpu.memory_gb * 1e9 / GIB
    reserve = RESERVE if gpu.usable_gib is None else known - gpu.usable_gib
    return Capacity(total or known, (total or known) - reserve, DISPLAY if gpu.display else 0.0)


def probed(gpu: Gpu, store: Path | None) -> Gpu:
    """Return the GPU with the usable memory that a probe in the store measured, if there is one."""
    figures = machine.ceilings(store, gpu.name) if store else {}
    if "usable_gb" not in figures:
        return gpu
    driver = figures.get("driver_total_gb")
    return replace(gpu, usable_gib=figures["usable_gb"], nvml_mib=driver * 1024 if driver else gpu.nvml_mib)


def machine_gpu(described: Mapping[str, Any], store: Path | None) -> Gpu | float:
    """Return the GPU of a machine.json from the table and the store's probes, or its GiB."""
    gpu = limited_gpu(described)
    return probed(gpu, store) if gpu else float(described["memory_gb"])
