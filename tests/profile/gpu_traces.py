"""Traces as Kineto writes them on a GPU: events of torch 2.11 with CUDA, built here so that tests need no GPU for
that. Two threads as in training: forward, loss and optimizer on one, the backward pass on autograd's."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

MAIN, AUTOGRAD, STREAM = 4711, 4712, 7
ORIGIN = 4415000467169.963  # µs, of the size that a trace has
GEMM = "nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopB_NTN"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul>)"
)
FLASH = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>>"
)
SOFTMAX = (
    "void at::native::(anonymous namespace)::cunn_SoftMaxForwardGmem<4, float, float, float, "
    "at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue, long>(float*, float const*, long)"
)


class GpuTrace:
    """Events in µs from the beginning of the first step."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._next = 100

    def add(self, cat: str, name: str, begin: float, length: float, tid: Any = MAIN, **args: Any) -> None:
        self.events.append({
            "ph": "X", "cat": cat, "name": name, "pid": 0 if cat in ("kernel", "gpu_memcpy") else MAIN, "tid": tid,
            "ts": ORIGIN + begin, "dur": length, "args": args,
        })  # fmt: skip

    def step(self, number: int, begin: float, length: float) -> None:
        self.add("user_annotation", f"ProfilerStep#{number}", begin, length)

    def phase(self, name: str, begin: float, length: float) -> None:
        self.add("user_annotation", f"ftbench.{name}", begin, length)

    def op(self, name: str, begin: float, length: float, tid: int = MAIN, **args: Any) -> None:
        self.add("cpu_op", name, begin, length, tid, **args)

    def launch(
        self, name: str, at: float, begin: float, length: float, tid: int = MAIN, cat: str = "kernel",
        call: str = "cudaLaunchKernel",
    ) -> None:  # fmt: skip
        """A call at `at` on a thread, and the kernel that it begins."""
        self._next += 1
        args = {"External id": self._next, "correlation": self._next}
        self.add(
            "cuda_driver" if call.startswith("cu") and call[2].isupper() else "cuda_runtime", call, at, 2, tid, **args
        )
        self.add(cat, name, begin, length, STREAM, device=0, stream=STREAM, grid=[1, 1, 1], **args)
        for ph, pid, thread, ts in (("s", MAIN, tid, at), ("f", 0, STREAM, begin)):
            self.events.append({"ph": ph, "id": self._next, "pid": pid, "tid": thread, "ts": ORIGIN + ts,
                                "cat": "ac2g", "name": "ac2g"})  # fmt: skip

    def without_kernels(self, share: float) -> GpuTrace:
        """Lose the last kernels, as a profiler does."""
        kernels = [event for event in self.events if event.get("cat") == "kernel"]
        lost = {id(event) for event in kernels[round((1 - share) * len(kernels)) :]}
        self.events = [event for event in self.events if id(event) not in lost]
        return self

    def write(self, path: Path) -> Path:
        head = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150110011392}],
            "displayTimeUnit": "ms", "baseTimeNanoseconds": 1790857026000000000,
        }  # fmt: skip
        path.write_bytes(gzip.compress(json.dumps(head | {"traceEvents": self.events}).encode(), 1))
        return path


def training(steps: int = 2, matmul_us: float = 300.0) -> GpuTrace:
    """Steps of 1,000 µs: the forward pass begins at 100, its loss at 300, the backward pass at 400, the optimizer at
    800; the training thread waits for the device from 500 to 800."""
    trace = GpuTrace()
    for number in range(steps):
        t, sequence = number * 1000.0, 10 * number
        trace.step(number + 7, t, 1000)
        for name, begin, length in (("data", 0, 100), ("forward", 100, 200), ("loss", 300, 60), ("forward", 360, 10),
                                    ("metrics", 370, 30), ("backward", 400, 400), ("optimizer", 800, 200)):  # fmt: skip
            trace.phase(name, t + begin, length)
        trace.op("aten::to", t + 50, 20)
        trace.launch("Memcpy HtoD (Pinned -> Device)", t + 55, t + 60, 10, cat="gpu_memcpy", call="cudaMemcpyAsync")
        trace.op("aten::linear", t + 110, 30, **{"Sequence number": sequence, "Fwd thread id": 0})
        trace.op("aten::mm", t + 115, 20, **{"Sequence number": sequence, "Fwd thread id": 0})
        trace.launch(GEMM, t + 120, t + 130, matmul_us, call="cuLaunchKernelEx")
        trace.op("aten::scaled_dot_product_attention", t + 150, 40)
        trace.launch(FLASH, t + 160, t + 430, 50)
        trace.launch(ADD.replace("4,", "2,"), t + 180, t + 480, 10)  # within the attention's operator
        trace.op("aten::add", t + 200, 10, **{"Sequence number": sequence + 1, "Fwd thread id": 0})
        trace.launch(ADD, t + 205, t + 490, 10)
        trace.op("aten::log_softmax", t + 305, 10, **{"Sequence number": sequence + 2, "Fwd thread id": 0})
        trace.launch(SOFTMAX, t + 310, t + 500, 20)
        trace.op("aten::mul", t + 320, 10, **{"Sequence number": sequence + 3, "Fwd thread id": 0})
        trace.launch(ADD, t + 322, t + 520, 10)  # a plain kernel of the loss
        for name, at, start, of in (("MulBackward0", 410, 530, 3), ("AddBackward0", 430, 540, 1)):
            trace.op(f"autograd::engine::evaluate_function: {name}", t + at, 15, AUTOGRAD,
                     **{"Sequence number": sequence + of, "Fwd thread id": 1})  # fmt: skip
            trace.launch(ADD, t + at + 5, t + start, 10, AUTOGRAD)
        trace.add("cuda_runtime", "cudaStreamSynchronize", t + 500, 300, MAIN, correlation=9)
        trace.op("aten::add_", t + 810, 10)
        trace.launch(ADD, t + 815, t + 820, 10)
    return trace
