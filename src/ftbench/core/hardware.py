"""Look up GPUs in the table facts/gpus.yaml."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from ftbench.facts import read_facts


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of the table facts/gpus.yaml. Unknown values are None.

    Attributes:
        match: Parts of the name that the driver reports.
        bf16: Peak bf16 rate in TFLOP/s, without 2:4 sparsity.
        fp8: Peak FP8 rate in TFLOP/s, without 2:4 sparsity.
        fp16: Peak FP16 rate in TFLOP/s of a GPU without bf16.
        memory_gb: Memory in GB (10**9 bytes).
        bandwidth: Memory bandwidth in GB/s.
        watts: Board power in watts.
        gemm_bf16: Highest published rate of large bf16 matrix products in TFLOP/s.
        nvml_mib: Memory in MiB according to the driver.
        usable_gib: Memory in GiB that CUDA gives to processes.
        display: Whether the card can drive a display.
        link: Bandwidth between two GPUs in one direction, in GB/s.
        peer_access: Whether the driver supports peer access between two of these GPUs.
    """

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
        """Return the peak rate in TFLOP/s of `bf16`, `fp16` or `fp8`. GPUs with bf16 have the same rate for fp16.
        Return None for other types."""
        return {"bf16": self.bf16, "fp16": self.bf16 or self.fp16, "fp8": self.fp8}.get(precision)


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return all GPUs of facts/gpus.yaml in the order of the file (the most specific names first)."""
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


# Different cards with a similar name: MIG instances, laptop GPUs, export versions, later variants.
_OTHER_CARD = re.compile(r"\bMIG\b|\bLaptop\b|\d D\b|\bSUPER\b|\bTi\b")


@cache
def find_gpu(driver_name: str) -> Gpu | None:
    """Return the GPU with this driver name, such as `NVIDIA H200`, or None. Only full words match: L40 is not L4."""
    if _OTHER_CARD.search(driver_name):
        return None
    called = (gpu for gpu in gpus() for part in gpu.match if re.search(rf"(?<!\w){re.escape(part)}(?!\w)", driver_name))
    return next(called, None)


def limited_gpu(described: Mapping[str, Any] | None) -> Gpu | None:
    """Return the GPU of facts/gpus.yaml for a GPU in machine.json, or None for an unknown GPU. If the driver limits the
    power to less than the board power, `watts` is this limit."""
    gpu = find_gpu(described["name"]) if described and described.get("name") else None
    limit = described.get("power_limit_w") if described else None
    return replace(gpu, watts=limit) if gpu and limit and limit < gpu.watts else gpu


@cache
def canonical_name(name: str) -> str:
    """Convert the driver's name of a GPU to its name in facts/gpus.yaml. Return any other name unchanged."""
    gpu = find_gpu(name)
    return gpu.name if gpu else name


# ROCm reports the gfx version (gfx942, gfx950) as compute capability.
_ROCM = {"cdna3": (9, 4), "cdna4": (9, 5)}
MODERN = (8, 0)  # assumed for unknown GPUs: with this capability, bfloat16 is fast


def capability_of(gpu: Gpu | float) -> tuple[int, int] | None:
    """Return the compute capability of a GPU. If only the memory is known (`gpu` is a float), return `MODERN`."""
    return gpu.compute_capability or _ROCM.get(gpu.arch) if isinstance(gpu, Gpu) else MODERN


def cublas_workspace(capability: tuple[int, int]) -> int:
    """Return the size of the cuBLAS workspace per thread in bytes. Hopper and data-centre Blackwell have 32 MiB. Other
    GPUs have 2 * 4096 KiB + 8 * 16 KiB (at::cuda::getChosenWorkspaceSize in torch's CUDABlas.cpp or
    CublasHandlePool.cpp)."""
    return 32 * 2**20 if capability in ((9, 0), (10, 0)) else (4096 * 2 + 16 * 8) * 1024


def rocm_refusal(torch: str) -> str:
    """Return the error message for a torch that is built for AMD GPUs. The message includes a solution."""
    return (
        f"torch {torch} is built for ROCm, but ftbench trains on NVIDIA GPUs and on CPUs. Estimates for AMD GPUs work "
        "(`ftbench estimate SPEC --gpu MI300X`). Set HIP_VISIBLE_DEVICES= (empty) to measure the CPU"
    )
