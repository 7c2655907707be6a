"""Recognize out-of-memory errors by their messages.

Each pattern is from the source of the project that raises the error.
"""

import re
from dataclasses import dataclass

# MPS prints GB for 2**30 bytes (format_size in MPSAllocator.mm).
_UNITS = {"B": 1, "BYTES": 1} | {f"{k}{b}": 1 << 10 * (i + 1) for i, k in enumerate("KMGT") for b in ("B", "IB")}
# Another CUDA error: out-of-memory messages before it in a log did not end the process.
_OTHER = re.compile(r"CUDA (?:driver )?error: (?!out of memory|CUBLAS_STATUS_ALLOC_FAILED)")
_PATTERNS: tuple[tuple[str, str], ...] = (
    # torch.OutOfMemoryError of the caching allocator, CUDA and HIP
    (
        "allocator",
        r"(?:CUDA|HIP|XPU|MPS backend) out of memory\.? .*?[Tt]ried to allocate (?P<size>[\d.]+ (?:bytes|[KMGT]i?B))",
    ),
    ("allocator", r"(?:CUDA|HIP|XPU|MPS backend) out of memory"),
    (
        "driver",
        r"CUDA (?:driver )?error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory",
    ),
    ("cublas", r"CUBLAS_STATUS_ALLOC_FAILED|HIPBLAS_STATUS_ALLOC_FAILED"),
    ("cudnn", r"CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_(?:DEVICE|HOST)_ALLOCATION_FAILED"),
    (
        "nccl",
        r"NCCL.*?(?:out of memory|[Ff]ailed to (?:CUDA|Cuda) (?:calloc|malloc)(?: async)? (?P<size>\d+(?: bytes)?))",
    ),
    ("host", r"(?:can't allocate|not enough) memory: you tried to allocate (?P<size>\d+ bytes)"),
    ("host", r"Unable to allocate (?P<size>[\d.]+ [KMGT]iB) for an array"),
    ("bitsandbytes", r"Error out of memory at line \d+ in file .*?\.c(?:u|pp)"),
)


@dataclass(frozen=True, slots=True)
class Oom:
    """An out-of-memory error.

    Attributes:
        kind: allocator, driver, cublas, cudnn, nccl, bitsandbytes (device memory), host, or kernel (OOM killer).
        bytes_requested: Size of the failed allocation, None if unknown.
    """

    kind: str
    bytes_requested: int | None = None
    phase: str | None = None
    step: int | None = None


def recognise(text: str) -> Oom | None:
    """Return the out-of-memory error in a message or at the end of a log; None for other errors."""
    text = _OTHER.split(text)[-1]
    for kind, pattern in _PATTERNS:
        if match := re.search(pattern, text, re.DOTALL if kind == "allocator" else 0):
            size = match.groupdict().get("size")
            return Oom(kind, _bytes(size) if size else None)
    return None


def _bytes(text: str) -> int:
    number, unit = re.fullmatch(r"([\d.]+) ?([A-Za-z]*)", text).groups()  # type: ignore[union-attr]
    return round(float(number) * _UNITS[unit.upper() or "B"])
