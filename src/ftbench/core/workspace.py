"""What cuBLAS takes beside the tensors."""

from __future__ import annotations

_LARGE = ((9, 0), (10, 0))


def cublas_workspace(capability: tuple[int, int]) -> int:
    """Return the bytes of cuBLAS's workspace in each thread that multiplies, on a GPU of this compute capability: 32
    MiB on Hopper and data-centre Blackwell, else 4096 KiB twice and 16 KiB eight times
    (at::cuda::getChosenWorkspaceSize, in torch's CUDABlas.cpp or CublasHandlePool.cpp)."""
    return 32 * 2**20 if capability in _LARGE else (4096 * 2 + 16 * 8) * 1024
