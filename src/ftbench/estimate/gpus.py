"""Find the GPUs that the option `--gpu` names, and the memory that a process can use on each GPU.

If a name matches several GPUs, the error message lists these GPUs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ftbench.core.hardware import Gpu, find_gpu, gpus, limited_gpu
from ftbench.core.units import GIB, gibibytes
from ftbench.errors import SpecError
from ftbench.spec.base import nearest
from ftbench.store import machine

ALL = "all"
_MAKERS = ("nvidia", "geforce", "tesla", "amd", "instinct")
RESERVE = 0.62  # default GiB that the driver keeps for itself: the maximum of the GPU table (H200)
DISPLAY = 0.5  # GiB left for a display on cards with display outputs


@dataclass(frozen=True, slots=True)
class Capacity:
    """The memory of a GPU in GiB: `total` (driver), `usable` (processes) and `margin` (kept free for a display)."""

    total: float
    usable: float
    margin: float = 0.0

    @property
    def words(self) -> str:
        """Total memory, usable memory and margin as text."""
        kept = f", less {gibibytes(self.margin)} for a display" if self.margin else ""
        return f"{gibibytes(self.total)} GiB in total (NVML), {gibibytes(self.usable)} for a process{kept}"


def capacity(gpu: Gpu | float, total: float | None = None) -> Capacity:
    """Return the memory of a GPU. `gpu` is a row of the GPU table, or the GiB of a GPU that is not in the table.

    `total` is the memory in GiB that the driver reports. The default comes from the table or the data sheet. A GB of a
    data sheet counts as 10**9 bytes, the smaller of its two usual meanings."""
    if not isinstance(gpu, Gpu):
        size = total or gpu
        return Capacity(size, max(0.0, size - RESERVE))
    known = gpu.nvml_mib / 1024 if gpu.nvml_mib else gpu.memory_gb * 1e9 / GIB
    reserve = RESERVE if gpu.usable_gib is None else known - gpu.usable_gib
    return Capacity(total or known, (total or known) - reserve, DISPLAY if gpu.display else 0.0)


def probed(gpu: Gpu, store: Path | None) -> Gpu:
    """Return the GPU with the memory that `ftbench probe` measured. Without a probe, return the GPU unchanged."""
    figures = machine.ceilings(store, gpu.name) if store else {}
    if "usable_gb" not in figures:
        return gpu
    driver = figures.get("driver_total_gb")
    return replace(gpu, usable_gib=figures["usable_gb"], nvml_mib=driver * 1024 if driver else gpu.nvml_mib)


def machine_gpu(described: Mapping[str, Any], store: Path | None) -> Gpu | float:
    """Return the GPU of a machine.json as a row of the GPU table. Return the memory in GiB of an unknown GPU."""
    gpu = limited_gpu(described)
    return probed(gpu, store) if gpu else float(described["memory_gb"])


def gpus_named(text: str) -> list[Gpu]:
    """Return the distinct GPUs of `--gpu NAME[,NAME]` or `--gpu all`. Raise SpecError for an unknown name."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise SpecError("--gpu: name GPUs of `ftbench list gpus`, separated by commas, or all")
    return [*dict.fromkeys(gpu for part in names for gpu in (gpus() if part == ALL else [gpu_named(part)]))]


def gpu_named(name: str) -> Gpu:
    """Return the only GPU that matches `name`: a name in the GPU table, a driver name, or some words of such a name.

    Raises:
        SpecError: No GPU matches, or several GPUs match."""
    plain = name.casefold()
    for gpu in gpus():
        if plain in (gpu.name.casefold(), f"nvidia {gpu.match[0]}".casefold()):
            return gpu
    similar = gpus_called(name) or [gpu for gpu in (find_gpu(name),) if gpu]
    if len(similar) == 1:
        return similar[0]
    if similar:
        several = ", ".join(f"{gpu.name} ({gpu.memory_gb:g} GB)" for gpu in similar)
        raise SpecError(f'--gpu {name}: matches several GPUs: {several}; name one, such as --gpu "{similar[0].name}"')
    meant = nearest(name, [gpu.name for gpu in gpus()], 0.8)  # 3060 is not B300
    raise SpecError(
        f"--gpu {name}: not in the table{meant or '; name one of `ftbench list gpus`, or run ftbench on it'}"
    )


def gpus_called(text: str) -> list[Gpu]:
    """Return the GPUs that match all words of `text`, such as `rtx4090`, `4090`, `h100-pcie` or `A100 SXM 80GB`."""
    words = _words(text)
    several = len(words) > 1  # `40` matches a memory size only after another word: `A100 40`
    return [gpu for gpu in gpus()
            if words and all(any(_same(word, own, several) for own in _names(gpu)) for word in words)]  # fmt: skip


def _same(word: str, own: str, or_memory: bool) -> bool:
    """Return whether `word` matches a GPU's word `own`: equal, `sxm` for `sxm4`, or (`or_memory`) `80` for `80gb`."""
    return own == word or (word.isalpha() and own.rstrip("0123456789") == word) or (or_memory and own == f"{word}gb")


@cache
def _names(gpu: Gpu) -> frozenset[str]:
    """Return the words of a GPU's names and memory. Adjacent words are also returned as one joined word."""
    names = [_words(name) for name in (gpu.name, *gpu.match)]
    runs = ("".join(name[start:end]) for name in names for start in range(len(name))
            for end in range(start + 1, len(name) + 1))  # fmt: skip
    return frozenset([*runs, f"{gpu.memory_gb:g}gb"])


def _words(name: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9]+", name.casefold()) if word not in _MAKERS]
