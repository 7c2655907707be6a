"""Measure the machine in the child process of `ftbench probe`: `python -m ftbench.worker.probe OUT_FILE`.

OUT_FILE is updated before each measurement. If the process is killed, the file contains the earlier results. 1 GB is
10**9 bytes, as in data sheets.
"""

import math
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.benchmark import Timer

from ftbench.core.units import GIB
from ftbench.errors import MissingError
from ftbench.store import machine
from ftbench.store.rundir import write_json
from ftbench.worker import gpu_lock
from ftbench.worker.device import check_device, device
from ftbench.worker.outcome import exit_now

BEST_S, LASTING_S = 0.6, 2.5
MOST_CALLS = 8  # larger sizes are skipped if BEST_S is too short for this number of calls
SIZES = {"cuda": (4096, 8192, 16384), "cpu": (512, 1024, 2048)}
ELEMENT_BYTES = 12  # upper limit: two matrices, their product, and 16-bit originals of fp8 matrices
MEMORY_BYTES = 2**30  # per tensor: eight times the largest cache of an NVIDIA GPU (128 MB)
LINK_BYTES = 2**28
# Each data type with its minimum compute capability (CUDA C++ programming guide, tensor core types).
KINDS = {"bf16": (8, 0), "fp16": (7, 0), "tf32": (8, 0), "fp32": (0, 0), "fp8": (8, 9), "int8": (7, 5)}
ON_CPU = ("bf16", "fp32")
Call = Callable[[], object]


class Document:
    """The results so far and the name of the current measurement, in a JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.figures: dict[str, Any] = {"notes": [], "products": {}}

    def item(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the result of `measure`. If `measure` fails, add the reason to `notes` and return None."""
        self.write(doing=name)
        try:
            return measure()
        except Exception as error:  # noqa: BLE001 - the other items can still be measured
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.figures["notes"].append(f"{name}: not measured: {first[:300]}")
            return None

    def write(self, doing: str | None) -> None:
        write_json(self._path, self.figures | {"doing": doing})


def main(out: Path) -> int:
    """Measure this machine and write the results to `out`. Return exit code 3 if the GPU cannot be used, else 0."""
    document, gpu = Document(out), machine.gpu()
    try:
        if not gpu_lock.try_acquire(gpu):
            raise MissingError("another run of ftbench uses this GPU: probe again when it has ended")
        check_device(gpu)
    except MissingError as error:
        document.figures["missing"] = str(error)
        document.write(None)
        return error.exit_code
    measure(document, device(), gpu or {})
    document.write(None)
    return 0


def measure(document: Document, hardware: torch.device, gpu: dict[str, Any]) -> None:
    """Run all measurements of a device and write the results to `document`. `gpu` is the driver's GPU description."""
    cuda, figures = hardware.type == "cuda", document.figures
    figures["device"] = {"kind": hardware.type, "name": torch.cuda.get_device_name(hardware) if cuda else None,
                         **({} if cuda else {"threads": torch.get_num_threads()})}  # fmt: skip
    with torch.no_grad():
        for kind in KINDS if cuda else ON_CPU:
            figures["products"][kind] = document.item(kind, partial(product, kind, hardware, _free(hardware) / 2))
        figures["memory"] = document.item("memory", lambda: memory(hardware, _free(hardware)))
        if cuda:
            # Memory that CUDA gives to processes, and memory of the card according to NVML.
            total = torch.cuda.mem_get_info(hardware)[1] / GIB
            figures["capacity"] = {"total_gb": total, "driver_total_gb": gpu.get("memory_gb")}
            figures["host_link"] = document.item("host_link", lambda: _host_link(hardware))
            figures["launch_us"] = document.item("launch_us", lambda: _launch_us(hardware))
        else:
            left = [*(kind for kind in KINDS if kind not in ON_CPU), "host_link", "launch_us"]
            figures["notes"].append(f"{', '.join(left)}: not measured: needs a GPU")


def _free(hardware: torch.device) -> float:
    """Return the free memory of the device in bytes."""
    if hardware.type != "cuda":
        return float(psutil.virtual_memory().available)
    torch.cuda.empty_cache()
    return float(torch.cuda.mem_get_info(hardware)[0])


# --- items -----------------------------------------------------------------------------------------------------------


def best(call: Call) -> float:
    """Return the seconds of a call: the median of the faster half of the measurements.

    The slower half is ignored. Interrupts, other processes and low clocks slow down some calls.
    """
    timed = timer(call)
    timed.blocked_autorange(min_run_time=BEST_S / 3)  # warm-up of clocks and caches
    times = timed.blocked_autorange(min_run_time=BEST_S * 2 / 3).times
    return statistics.median(sorted(times)[: math.ceil(len(times) / 2)])


def timer(call: Call) -> Any:
    """Return torch's timer for a call. The timer waits for the device."""
    return Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())


def operands(name: str, size: int, hardware: torch.device) -> Call:
    """Return a function that multiplies two random square matrices. Products of zeros would need less power.

    With 8 bits, the right matrix is column-major, as cuBLAS requires. Products in fp8 use one scale per tensor and fast
    accumulation, like the forward pass of torchao's tensorwise recipe.
    """
    if name == "int8":
        left, right = (torch.randint(-127, 128, (size, size), device=hardware, dtype=torch.int8) for _ in range(2))
        return lambda: torch._int_mm(left, right.t())
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}.get(name, torch.float32)
    left, right = (torch.randn(size, size, device=hardware, dtype=dtype) for _ in range(2))
    if name != "fp8":
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        out = torch.empty_like(left)
        return lambda: torch.mm(left, right, out=out)
    small, turned = (each.to(torch.float8_e4m3fn) for each in (left, right))
    unit = torch.ones((), device=hardware, dtype=torch.float32)
    return lambda: torch._scaled_mm(small, turned.t(), unit, unit, out_dtype=torch.bfloat16, use_fast_accum=True)


def product(name: str, hardware: torch.device, free: float) -> dict[str, Any]:
    """Return the best and the sustained rate of matrix products in TFLOP/s. Matrices use at most `free` bytes.

    Raise RuntimeError if the GPU or the library does not support the data type `name`.
    """
    if hardware.type == "cuda" and (have := torch.cuda.get_device_capability(hardware)) < (need := KINDS[name]):
        raise RuntimeError(f"needs compute capability {need[0]}.{need[1]}, but this GPU has {have[0]}.{have[1]}")
    times: dict[int, float] = {}
    for size in SIZES[hardware.type]:
        slow = max(times.values(), default=0.0) * MOST_CALLS > BEST_S  # the next size takes about 8 times longer
        if times and (slow or size * size * ELEMENT_BYTES > free):
            break
        times[size] = best(operands(name, size, hardware))
    size = max(times, key=lambda size: tflops(size, times[size]))
    timed, count = timer(operands(name, size, hardware)), max(1, round(LASTING_S / 3 / times[size]))
    timed.timeit(count)  # warm-up of clocks and power
    lasting = tflops(size, timed.timeit(2 * count).mean)
    return {"best_tflops": tflops(size, times[size]), "best_size": size, "sustained_tflops": lasting}


def tflops(size: int, seconds: float) -> float:
    """Return the TFLOP/s of a product of two square matrices: `2 * size**3 / seconds / 10**12`."""
    return 2 * size**3 / seconds / 1e12


def memory(hardware: torch.device, free: float) -> dict[str, Any]:
    """Return the GB/s of a copy and of a triad `c = a + 3 * b`. A copy reads one tensor and writes one. A triad reads
    two tensors and writes one. Bytes are counted as in STREAM, without reads of a write-allocate cache."""
    first, second, third = torch.ones(3, int(min(MEMORY_BYTES, free / 8)) // 4, device=hardware)
    return {
        "copy_gbs": 2 * first.nbytes / best(lambda: third.copy_(first)) / 1e9,
        "triad_gbs": 3 * first.nbytes / best(lambda: torch.add(first, second, alpha=3.0, out=third)) / 1e9,
    }


def _host_link(hardware: torch.device) -> dict[str, Any]:
    """Return the GB/s of copies to and from the GPU with pinned host memory, one direction at a time."""
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(LINK_BYTES, dtype=torch.uint8, device=hardware)
    return {
        "to_device_gbs": LINK_BYTES / best(lambda: on_device.copy_(host, non_blocking=True)) / 1e9,
        "to_host_gbs": LINK_BYTES / best(lambda: host.copy_(on_device, non_blocking=True)) / 1e9,
    }


def _launch_us(hardware: torch.device) -> float:
    """Return the microseconds of host time per torch operation, including torch's overhead. Each operation changes one
    number, because such a kernel takes less time than its launch."""
    number = torch.zeros(1, device=hardware)
    return best(lambda: number.add_(1)) * 1e6


if __name__ == "__main__":
    exit_now(main(Path(sys.argv[1])))
