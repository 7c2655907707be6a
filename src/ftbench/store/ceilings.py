"""The peak rates of a GPU, measured by `ftbench probe`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ftbench.core.hardware import canonical_name
from ftbench.store import rundir

FOLDER = "probe"  # in a results folder, next to the experiments


def of(store: Path, gpu_name: str | None) -> dict[str, Any]:
    """Return the best measured rates of a GPU by its name in the driver or the GPU table.

    If several cards or probes measured a rate, the fastest counts: a hot or busy card is not representative.

    Args:
        store: The results folder with the probes.
        gpu_name: The GPU; None for processes on the CPU (`network_gbs` only).

    Returns:
        A subset of: `tflops` by precision; `memory_gbs`, `to_device_gbs` and `to_host_gbs` in GB/s; `network_gbs`, the
        bus bandwidth of an all-reduce over the machine's GPUs; `launch_us` in µs; `usable_gb`, the GiB that CUDA gives
        to processes, of `driver_total_gb`.
    """
    documents = _documents(store, gpu_name)
    products = [document.get("products", {}) for document in documents]
    memory, link, links, capacity = (
        [d.get(name) for d in documents] for name in ("memory", "host_link", "links", "capacity")
    )
    rates = {kind: _best(max, [each.get(kind) for each in products], "best_tflops")
             for kind in sorted({kind for each in products for kind in each})}  # fmt: skip
    ceilings = {
        "tflops": {kind: rate for kind, rate in rates.items() if rate is not None},
        "memory_gbs": _best(max, memory, "copy_gbs"),
        "to_device_gbs": _best(max, link, "to_device_gbs"),
        "to_host_gbs": _best(max, link, "to_host_gbs"),
        "network_gbs": _best(max, links, "all_reduce_bus_gbs"),
        "launch_us": _best(min, documents, "launch_us"),
        "usable_gb": _best(min, capacity, "total_gb"),
        "driver_total_gb": _best(min, capacity, "driver_total_gb"),
    }
    names = ceilings if gpu_name else ("network_gbs",)
    return {name: value for name, value in ceilings.items() if name in names and value not in (None, {})}


def _best(pick: Any, parts: Iterable[dict[str, Any] | None], name: str) -> float | None:
    figures = [float(figure) for part in parts if part and (figure := part.get(name)) and figure > 0]
    return pick(figures) if figures else None


def _documents(store: Path, gpu_name: str | None) -> list[dict[str, Any]]:
    documents = [rundir.read_json(path) for path in sorted((store / FOLDER).glob("*.json"))]
    if gpu_name is None:
        return [document for document in documents if (document.get("device") or {}).get("kind") == "cpu"]
    return [
        document
        for document in documents
        if (document.get("device") or {}).get("kind") == "cuda"
        and (name := rundir.first_gpu(document.get("machine", {})).get("name"))
        and canonical_name(name) == canonical_name(gpu_name)
    ]
