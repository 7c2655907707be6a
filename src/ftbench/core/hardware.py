"""The GPU table (facts/gpus.yaml): dense peaks, memory, bandwidth, watts. An unknown GPU is None, never a default."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from ftbench.facts import read_facts


@dataclass(frozen=True, slots=True)
class Gpu:
    """One row of the table. Peaks in dense TFLOP/s (no 2:4 sparsity), memory in GB (10**9 bytes), bandwidth in GB/s,
    board power in W; None where no source is known. `gemm_bf16` is the highest rate of large bf16 products that others
    have published, TFLOP/s. `nvml_mib` is the memory as the driver reports it, `usable_gib` what CUDA gives processes
    of it in all; a card with a `display` may show a screen. `link` is what one sends another, GB/s in one
    direction, and `peer_access` says whether their driver lets them read each other's memory. `fp16` is the peak of a
    GPU that has no bf16."""

    name: str
    match: tuple[str, ...]
    arch: str
    compute_capability: tuple[int, int] | None
    bf16: float | None
    fp8: float | None
    memory_gb: float
    bandwidth: float
    watts: float
    gemm_bf16: float | None = None
    nvml_mib: float | None = None
    usable_gib: float | None = None
    display: bool = False
    link: float | None = None
    peer_access: bool = True
    fp16: float | None = None

    def peak_tflops(self, precision: str) -> float | None:
        """Return the dense tensor peak of `bf16`, `fp16` (where there is bf16 the same) or `fp8`; None for others."""
        return {"bf16": self.bf16, "fp16": self.bf16 or self.fp16, "fp8": self.fp8}.get(precision)


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return all rows, in the order in which names are tried: most specific first."""
    return tuple(_gpu(row) for row in read_facts("gpus.yaml"))


def _gpu(row: dict[str, Any]) -> Gpu:
    capability, published = row.get("cc"), row["gemm_bf16"]
    major, _, minor = str(capability).partition(".")
    read = {field.name: row[field.name] for field in fields(Gpu) if field.name in row}
    return Gpu(**read | {
        "match": tuple(row["match"]),
        "compute_capability": (int(major), int(minor)) if capability else None,
        "gemm_bf16": max(published) if isinstance(published, list) else published,
    })  # fmt: skip


# Not the card whose name they bear: a slice of a GPU, a laptop's, the export version, a later one with more units.
_OTHER_CARD = re.compile(r"\bMIG\b|\bLaptop\b|\d D\b|\bSUPER\b|\bTi\b")


@cache  # a sweep asks for each of its cells
def find_gpu(driver_name: str) -> Gpu | None:
    """Return the table's row for a name as the driver reports it ("NVIDIA H200"), or None. Names are compared word by
    word: an L40 is no L4 and a GH200 no H200."""
    if _OTHER_CARD.search(driver_name):
        return None
    called = (gpu for gpu in gpus() for part in gpu.match if re.search(rf"(?<!\w){re.escape(part)}(?!\w)", driver_name))
    return next(called, None)


def limited_gpu(described: Mapping[str, Any] | None) -> Gpu | None:
    """Return the table's row for a GPU of a machine.json, with the watts that the machine holds it to where they are
    fewer than its board's; None where it is in no table."""
    gpu = find_gpu(described["name"]) if described and described.get("name") else None
    limit = described.get("power_limit_w") if described else None
    return replace(gpu, watts=limit) if gpu and limit and limit < gpu.watts else gpu


def gpus_called(words: str) -> list[Gpu]:
    """Return the rows that a person may mean: those of which some words in a row are these, however they are written
    (`rtx4090`, `4090`, `h100-pcie`)."""
    wanted = "".join(_words(words))
    return [gpu for gpu in gpus() if wanted and wanted in _runs_of_words(gpu.name)]


@cache
def _runs_of_words(name: str) -> frozenset[str]:
    words = _words(name)
    ends = range(1, len(words) + 1)
    return frozenset("".join(words[start:end]) for start in range(len(words)) for end in ends if start < end)


def _words(name: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9]+", name.casefold()) if word not in _MAKERS]


_MAKERS = ("nvidia", "geforce", "tesla", "amd", "instinct")


@cache
def canonical_name(name: str) -> str:
    """Return the table's name of a GPU named so there or by its driver; other names stand for themselves."""
    if any(gpu.name == name for gpu in gpus()):
        return name
    gpu = find_gpu(name)
    return gpu.name if gpu else name


def supports_fp8(compute_capability: tuple[int, int]) -> bool:
    """Return whether there are FP8 products: from Ada (8.9) on, NVIDIA CUDA programming guide, compute capabilities."""
    return compute_capability >= (8, 9)


# What ROCm reports as compute capability: the gfx version (gfx942, gfx950).
_ROCM = {"cdna3": (9, 4), "cdna4": (9, 5)}


MODERN = (8, 0)  # what a GPU of unknown kind is taken to be: one with fast bfloat16


def capability_of(gpu: Gpu | float) -> tuple[int, int] | None:
    """Return the compute capability that torch reports on such a GPU, or one of so many GiB."""
    return gpu.compute_capability or _ROCM.get(gpu.arch) if isinstance(gpu, Gpu) else MODERN


def cublas_workspace(capability: tuple[int, int]) -> int:
    """Return the bytes of cuBLAS's workspace in each thread that multiplies, on a GPU of this compute capability: 32
    MiB on Hopper and data-centre Blackwell, else 4096 KiB twice and 16 KiB eight times
    (at::cuda::getChosenWorkspaceSize, in torch's CUDABlas.cpp or CublasHandlePool.cpp)."""
    return 32 * 2**20 if capability in ((9, 0), (10, 0)) else (4096 * 2 + 16 * 8) * 1024


def rocm_refusal(torch: str) -> str:
    """Return why nothing is trained on AMD's GPUs, which this version of torch is built for, and the way out."""
    return (
        f"torch {torch} is built for ROCm, and ftbench trains on NVIDIA's GPUs and on CPUs: of AMD's it only estimates "
        "(`ftbench estimate SPEC --gpu MI300X`); set HIP_VISIBLE_DEVICES= (empty) to measure the CPU"
    )
