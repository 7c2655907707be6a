"""Recognize out-of-memory errors by their messages.

Each pattern comes from the source code of the project that raises the error.
"""

import re
from dataclasses import dataclass

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
# If another CUDA error follows an out-of-memory message in a log, the other error ended the process.
_OTHER = re.compile(r"CUDA (?:driver )?error: (?!out of memory|CUBLAS_STATUS_ALLOC_FAILED)")
_PATTERNS: tuple[tuple[str, str], ...] = (
    # torch.OutOfMemoryError of the caching allocator
    ("allocator", r"CUDA out of memory\.? .*?[Tt]ried to allocate (?P<size>[\d.]+ (?:bytes|[KMGT]iB))"),
    ("allocator", r"CUDA out of memory"),
    ("driver", r"CUDA (?:driver )?error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation"),
    ("cublas", r"CUBLAS_STATUS_ALLOC_FAILED"),
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
        kind: allocator, driver, cublas, cudnn, nccl or bitsandbytes (GPU memory); host or kernel (CPU memory).
        bytes_requested: Size of the failed allocation, None if unknown.
    """

    kind: str
    bytes_requested: int | None = None
    phase: str | None = None
    step: int | None = None


def recognise(text: str) -> Oom | None:
    """Return the out-of-memory error in a message or at the end of a log. Return None for other errors."""
    text = _OTHER.split(text)[-1]
    for kind, pattern in _PATTERNS:
        if match := re.search(pattern, text, re.DOTALL if kind == "allocator" else 0):
            number, _, unit = (match.groupdict().get("size") or "").partition(" ")
            return Oom(kind, round(float(number) * _UNITS[unit or "bytes"]) if number else None)
    return None
