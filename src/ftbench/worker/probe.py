"""The child process of `ftbench probe`: `python -m ftbench.worker.probe OUT_FILE SECONDS`.

It measures all items within a time budget. OUT_FILE is written after each item, so that earlier measurements are kept
if this process is killed. GB are 10**9 bytes, as in data sheets.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from ftbench.core.units import GIB
from ftbench.errors import MissingError
from ftbench.store import machine
from ftbench.store.rundir import write_json
from ftbench.worker import gpu_lock, probe_links
from ftbench.worker.device import check_device, device
from ftbench.worker.outcome import exit_now
from ftbench.worker.probe_links import Call, faster_half, timer

IDLE_S = 1.2
PRODUCT_S, ITEM_S = 6.0, 3.0  # an item is skipped if less is left
BEST_S, LASTING_S = 0.6, 2.5
MOST_CALLS = 8  # of a product in BEST_S, at least
SIZES = {"cuda": (4096, 8192, 16384), "cpu": (512, 1024, 2048)}
ELEMENT_BYTES = 12  # at most: both matrices, the product, and 16-bit originals of fp8 operands
MEMORY_BYTES = 2**30  # per tensor: eight times the largest cache of an NVIDIA GPU (128 MB)
LINK_BYTES = 2**28
# Each data type with its minimum compute capability (CUDA C++ programming guide, tensor core types).
KINDS = {"bf16": (8, 0), "fp16": (7, 0), "tf32": (8, 0), "fp32": (0, 0), "fp8": (8, 9), "int8": (7, 5)}
ON_CPU = ("bf16", "fp32")


class Document:
    """The measurements so far and the current item."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._end = path, time.monotonic() + seconds
        self.figures: dict[str, Any] = {"notes": [], "products": {}}

    def left(self) -> float:
        """Return the remaining seconds, negative if the budget is used up."""
        return self._end - time.monotonic()

    def item(self, name: str, needed: float, measure: Callable[[], Any]) -> Any:
        """Return the result of `measure`, or None with the reason in `notes`."""
        self.write(doing=name)
        if self.left() < needed:
            self.figures["notes"].append(f"{name}: not measured: no time left")
            return None
        try:
            return measure()
        except Exception as error:  # noqa: BLE001 - the other items can still be measured
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.figures["notes"].append(f"{name}: not measured: {first[:300]}")
            return None

    def write(self, doing: str | None) -> None:
        write_json(self._path, self.figures | {"doing": doing})


def main(out: Path, seconds: float) -> int:
    """Measure this machine and write the results to `out`. Return exit code 3 if torch cannot use the GPU."""
    document, untouched = Document(out, seconds), machine.gpu()
    if not gpu_lock.try_acquire(untouched):
        return _missing(document, "another run of ftbench uses this GPU: probe again when it has ended")
    document.figures["idle"] = _idle()  # before there is a CUDA context, which raises the clock
    try:
        check_device(machine.gpu())
    except MissingError as error:
        return _missing(document, str(error))
    hardware = device()
    if hardware.type == "cuda":
        document.figures["capacity"] = _capacity(hardware, untouched or {})
    measure(document, hardware)
    document.write(None)
    return 0


def _missing(document: Document, reason: str) -> int:
    document.figures["missing"] = reason
    document.write(None)
    return MissingError.exit_code


def measure(document: Document, hardware: torch.device) -> None:
    """Add all items of a device to the document."""
    cuda, figures = hardware.type == "cuda", document.figures
    gpus = torch.cuda.device_count() if cuda else 0
    figures["device"] = {"kind": hardware.type, "name": torch.cuda.get_device_name(hardware) if cuda else None,
                         "gpus": gpus, **({} if cuda else {"threads": torch.get_num_threads()})}  # fmt: skip
    with torch.no_grad():
        for kind in KINDS if cuda else ON_CPU:
            measured = partial(product, kind, hardware, document.left(), _free(hardware) / 2)
            figures["products"][kind] = document.item(kind, PRODUCT_S, measured)
        figures["memory"] = document.item("memory", ITEM_S, lambda: memory(hardware, _free(hardware)))
        if cuda:
            figures["host_link"] = document.item("host_link", ITEM_S, lambda: _host_link(hardware))
            figures["launch_us"] = document.item("launch_us", ITEM_S, lambda: _launch_us(hardware))
            torch.cuda.empty_cache()
        else:
            left = [*(kind for kind in KINDS if kind not in ON_CPU), "host_link", "launch_us"]
            figures["notes"].append(f"{', '.join(left)}: not measured: needs a GPU")
    world, backend = (gpus, "nccl") if cuda else (2, "gloo")
    if world > 1:
        tested = document.item(
            "links", probe_links.LINKS_S, lambda: probe_links.self_test(world, backend, document.left())
        )
        figures["links"], notes = tested or (None, [])
        figures["notes"] += notes


def _idle() -> dict[str, Any] | None:
    """Return the idle power in W. NVML averages it over one second. None if NVML shows no GPU."""
    nvml = machine.nvml_module()
    handle = machine.handle_of(nvml, os.environ.get("CUDA_VISIBLE_DEVICES")) if nvml else None
    if nvml is None or handle is None:
        return None
    time.sleep(IDLE_S)
    with suppress(nvml.NVMLError):
        return {"power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000}
    return None


def _capacity(hardware: torch.device, untouched: dict[str, Any]) -> dict[str, float | None]:
    """Return memory in GiB before the first tensor: total and free according to cudaMemGetInfo, total and used
    according to NVML, and the size of this process's context. `untouched` describes the GPU before the context
    existed."""
    free, total = torch.cuda.mem_get_info(hardware)  # creates the context
    now = machine.gpu() or {}
    used, before = now.get("memory_used_before_gb"), untouched.get("memory_used_before_gb")
    context = None if used is None or before is None else used - before
    return {
        "total_gb": total / GIB, "free_gb": free / GIB, "driver_total_gb": now.get("memory_gb"),
        "driver_used_gb": used, "context_gb": context,
    }  # fmt: skip


def _free(hardware: torch.device) -> float:
    """Return the free memory in bytes."""
    if hardware.type != "cuda":
        return float(psutil.virtual_memory().available)
    torch.cuda.empty_cache()
    return float(torch.cuda.mem_get_info(hardware)[0])


# --- items -----------------------------------------------------------------------------------------------------------


def best(call: Call) -> float:
    """Return the seconds of a call: the median of the faster half of the measurements.

    Interrupts, other processes and rising clocks only make a call slower, so the slower half is ignored.
    """
    timed = timer(call)
    timed.blocked_autorange(min_run_time=BEST_S / 3)  # warm-up of clocks and caches
    return faster_half(timed.blocked_autorange(min_run_time=BEST_S * 2 / 3).times)


def operands(name: str, size: int, hardware: torch.device) -> Call:
    """Return a product of two square matrices. They are random, because products of zeros need less power.

    The 8-bit ones have a column-major right matrix, as cuBLAS requires. fp8 has one scale per tensor and fast
    accumulation, like the forward product of torchao's tensorwise recipe.
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


def product(name: str, hardware: torch.device, seconds: float, free: float) -> dict[str, Any]:
    """Return the best and the sustained rate of one data type in TFLOP/s, with at most `free` bytes for operands.

    Raise RuntimeError if the GPU or the library does not support it.
    """
    if hardware.type == "cuda" and (have := torch.cuda.get_device_capability(hardware)) < (need := KINDS[name]):
        raise RuntimeError(f"needs compute capability {need[0]}.{need[1]}, but this GPU has {have[0]}.{have[1]}")
    times: dict[int, float] = {}
    for size in SIZES[hardware.type]:
        slow = max(times.values(), default=0.0) * 8 * MOST_CALLS > min(BEST_S * 8, seconds - LASTING_S)
        if times and (slow or size * size * ELEMENT_BYTES > free):  # the next product takes about eight times as long
            break
        times[size] = best(operands(name, size, hardware))
    rates = [{"size": size, "tflops": tflops(size, each)} for size, each in times.items()]
    top = max(rates, key=lambda rate: rate["tflops"])
    size = int(top["size"])
    timed, count = timer(operands(name, size, hardware)), max(1, round(LASTING_S / 3 / times[size]))
    timed.timeit(count)  # until clocks and power have settled
    lasting = timed.timeit(2 * count)
    return {
        "best_tflops": top["tflops"], "best_size": size, "sizes": rates,
        "sustained_tflops": tflops(size, lasting.mean), "sustained_s": lasting.mean * 2 * count,
    }  # fmt: skip


def tflops(size: int, seconds: float) -> float:
    """Return TFLOP/s of a product of two square matrices: 2 * size**3 FLOPs."""
    return 2 * size**3 / seconds / 1e12


def memory(hardware: torch.device, free: float) -> dict[str, Any]:
    """Return GB/s of a copy (one tensor read, one written) and of a triad `c = a + 3 b` (two read, one written),
    counted as in STREAM, without the reads of a write-allocate cache."""
    first, second, third = torch.ones(3, int(min(MEMORY_BYTES, free / 8)) // 4, device=hardware)
    return {
        "copy_gbs": 2 * first.nbytes / best(lambda: third.copy_(first)) / 1e9,
        "triad_gbs": 3 * first.nbytes / best(lambda: torch.add(first, second, alpha=3.0, out=third)) / 1e9,
        "tensor_bytes": first.nbytes,
    }


def _host_link(hardware: torch.device) -> dict[str, Any]:
    """Return GB/s to and from the device with pinned host memory, one direction at a time."""
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=hardware)
    return {
        "to_device_gbs": LINK_BYTES / best(lambda: there.copy_(host, non_blocking=True)) / 1e9,
        "to_host_gbs": LINK_BYTES / best(lambda: host.copy_(there, non_blocking=True)) / 1e9,
        "buffer_bytes": LINK_BYTES,
    }


def _launch_us(hardware: torch.device) -> float:
    """Return the microseconds per torch operation in a long sequence of operations on one number. The kernel takes less
    time than its launch, so this is the host's time including torch's overhead."""
    number = torch.zeros(1, device=hardware)
    return best(lambda: number.add_(1)) * 1e6


if __name__ == "__main__":
    exit_now(main(Path(sys.argv[1]), float(sys.argv[2])))
