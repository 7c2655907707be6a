import pytest

from ftbench.core.oom import Oom, recognise

MESSAGES = [
    (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 139.72 "
        "GiB of which 512.00 MiB is free. Including non-PyTorch memory, this process has 139.21 GiB memory in use.",
        "allocator",
        round(1.16 * 2**30),
    ),
    (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.80 GiB total)",
        "allocator",
        20 << 20,
    ),
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 512 bytes.", "allocator", 512),
    ("torch.OutOfMemoryError: CUDA out of memory.\nTried to allocate\n", "allocator", None),
    ("RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", "driver", None),
    ("RuntimeError: CUDA driver error: out of memory", "driver", None),
    ("CUDA_ERROR_OUT_OF_MEMORY", "driver", None),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cublas", None),
    ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "cudnn", None),
    ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "cudnn", None),
    ("ncclUnhandledCudaError: NCCL error, Last error:\nNCCL WARN Failed to CUDA calloc async 608 bytes", "nccl", 608),
    ("node:1 [0] NCCL WARN Cuda failure 2 'out of memory'", "nccl", None),
    (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)",
        "host",
        8 << 30,
    ),
    ("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes.", "host", 4096),
    (
        "Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type int64",
        "host",
        round(7.45 * 2**30),
    ),
    ("Error out of memory at line 380 in file /src/csrc/pythonInterface.cpp", "bitsandbytes", None),
]


@pytest.mark.parametrize(("message", "kind", "size"), MESSAGES, ids=[f"{kind}-{size}" for _, kind, size in MESSAGES])
def test_out_of_memory_is_recognized_with_its_size(message, kind, size):
    assert recognise(message) == Oom(kind, size)
    log = "step 1\nloss 2.0\n" * 1000 + "Traceback (most recent call last):\n" + message + "\n"
    assert recognise(log) == Oom(kind, size)


@pytest.mark.parametrize(
    "message",
    [
        "",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
        "torch._inductor.exc.InductorError: OutOfResources: out of resource: shared memory, Required: 262144",
        "OSError: [Errno 28] No space left on device",
        "ValueError: the memory of this run is fine",
    ],
)
def test_other_failures_are_not_out_of_memory(message):
    assert recognise(message) is None


def test_a_later_cuda_error_is_not_out_of_memory():
    caught = "autotune: CUDA out of memory. Tried to allocate 1.00 GiB."
    assert recognise(f"{caught}\nRuntimeError: CUDA error: an illegal memory access was encountered") is None
    assert recognise(f"CUDA error: device-side assert triggered\n{caught}") == Oom("allocator", 1 << 30)
