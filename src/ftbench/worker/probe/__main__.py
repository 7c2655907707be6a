"""Measure all items within a time budget: `python -m ftbench.worker.probe OUT_FILE SECONDS`.

OUT_FILE is written after each item, so that earlier measurements are kept if this process is killed.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ftbench.core.units import GIB
from ftbench.errors import MissingError
from ftbench.store import machine
from ftbench.store.rundir import write_json
from ftbench.worker import gpu_lock
from ftbench.worker.measure.sampler import Sampler
from ftbench.worker.outcome import exit_now
from ftbench.worker.probe.timing import SAMPLE_S, Budget, during

IDLE_S = 1.2  # NVML averages the power over one second
PRODUCT_S = 6.0  # maximum per data type; one is skipped if less is left
ITEM_S = 3.0


class Document:
    """The measurements so far and the current item."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.figures: dict[str, Any] = {"notes": [], "products": {}}

    def item(self, name: str, budget: Budget, needed: float, measure: Callable[[], Any]) -> Any:
        """Return the result of `measure`, or None with the reason in `notes`."""
        self.write(doing=name)
        if budget.left() < needed:
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
    budget, document, untouched = Budget(seconds), Document(out), machine.gpu()
    if not gpu_lock.try_acquire(untouched):
        document.figures["missing"] = "another run of ftbench uses this GPU: probe again when it has ended"
        document.write(None)
        return MissingError.exit_code
    sampler = _sampler()
    document.figures["idle"] = _idle(sampler)  # before importing torch, because a CUDA context raises the clock
    if sampler is None:
        document.figures["notes"].append("power, clocks and temperature: not measured: NVML shows no GPU")
    document.write("import torch")
    from ftbench.worker.device import check_device, device

    try:
        check_device(machine.gpu())
    except MissingError as error:
        document.figures["missing"] = str(error)
        document.write(None)
        return MissingError.exit_code
    if device().type == "cuda":
        document.figures["capacity"] = _capacity(device(), untouched or {})
    _measure(document, budget, device(), sampler)
    document.write(None)
    return 0


def _measure(document: Document, budget: Budget, device: Any, sampler: Sampler | None) -> None:
    import torch

    from ftbench.worker.measure.meters import meters
    from ftbench.worker.probe import links, products, transfers

    cuda = device.type == "cuda"
    clock, _ = meters(device)
    figures = document.figures
    figures["device"] = _device(device)

    def product(kind: str) -> Callable[[], Any]:
        return lambda: products.measure(kind, device, clock, sampler, budget, _free(device) / 2)

    with torch.no_grad():
        for kind in products.KINDS if cuda else products.ON_CPU:
            figures["products"][kind] = document.item(kind, budget, PRODUCT_S, product(kind))
            if cuda:
                torch.cuda.empty_cache()
        figures["memory"] = document.item(
            "memory", budget, ITEM_S, lambda: transfers.memory(device, clock, _free(device))
        )
        if cuda:
            figures["host_link"] = document.item(
                "host_link", budget, ITEM_S, lambda: transfers.host_link(device, clock)
            )
            figures["launch_us"] = document.item(
                "launch_us", budget, ITEM_S, lambda: transfers.launch_us(device, clock)
            )
            torch.cuda.empty_cache()
        else:
            left = [*(kind for kind in products.KINDS if kind not in products.ON_CPU), "host_link", "launch_us"]
            figures["notes"].append(f"{', '.join(left)}: not measured: needs a GPU")
    gpus, backend = (torch.cuda.device_count(), "nccl") if cuda else (2, "gloo")
    if gpus > 1:
        tested = document.item("links", budget, links.MINIMUM_S, lambda: links.self_test(gpus, backend, budget))
        figures["links"], notes = tested or (None, [])
        figures["notes"] += notes


def _device(device: Any) -> dict[str, Any]:
    import torch

    if device.type == "cuda":
        return {"kind": "cuda", "name": torch.cuda.get_device_name(device), "gpus": torch.cuda.device_count()}
    return {"kind": "cpu", "name": None, "gpus": 0, "threads": torch.get_num_threads()}


def _capacity(device: Any, untouched: dict[str, Any]) -> dict[str, float | None]:
    """Return memory in GiB before the first tensor: total and free according to cudaMemGetInfo, total and used
    according to NVML, and the size of this process's context. `untouched` describes the GPU before the context
    existed."""
    import torch

    free, total = torch.cuda.mem_get_info(device)  # creates the context
    now = machine.gpu() or {}
    used, before = now.get("memory_used_before_gb"), untouched.get("memory_used_before_gb")
    context = None if used is None or before is None else used - before
    return {
        "total_gb": total / GIB, "free_gb": free / GIB, "driver_total_gb": now.get("memory_gb"),
        "driver_used_gb": used, "context_gb": context,
    }  # fmt: skip


def _free(device: Any) -> float:
    """Return the free memory in bytes."""
    import torch

    return float(torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available)


def _sampler() -> Sampler | None:
    nvml = machine.nvml_module()
    handle = machine.handle_of(nvml, os.environ.get("CUDA_VISIBLE_DEVICES")) if nvml else None
    return None if handle is None else Sampler(nvml, handle)


def _idle(sampler: Sampler | None) -> dict[str, Any] | None:
    """Return idle power, clock and temperature, before this process uses the GPU."""
    if sampler is None:
        return None
    begin = time.perf_counter()
    while time.perf_counter() < begin + IDLE_S:
        sampler.take()
        time.sleep(SAMPLE_S)
    return during(sampler, begin, time.perf_counter())


if __name__ == "__main__":
    exit_now(main(Path(sys.argv[1]), float(sys.argv[2])))
