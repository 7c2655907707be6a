"""What the documents of `ftbench probe` in a store say a GPU can do at best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftbench.core.hardware import canonical_name
from ftbench.store import rundir

FOLDER = "probe"  # in a store, beside the experiments


def of(store: Path, gpu_name: str | None) -> dict[str, Any]:
    """Return the ceilings of a GPU of this name, the driver's or the GPU table's: `tflops` by precision (`bf16`,
    `fp16`, `tf32`, `fp32`, `fp8`, `int8`), `memory_gbs`, `to_device_gbs` and `to_host_gbs` in GB/s, `launch_us` in µs,
    and in GiB `usable_gb`, what CUDA gives processes of `driver_total_gb`. What no probe has measured is left out;
    without a probe there is nothing.

    They are ceilings, so of several cards and several probes the fastest counts: a card that is hot or sick, or was
    not free, says little about what others of its kind can do.
    """
    documents = _documents(store, gpu_name)
    precisions = {name for document in documents for name in _section(document, "products")}
    rates = {name: _best(documents, max, "products", name, "best_tflops") for name in sorted(precisions)}
    ceilings = {
        "tflops": {name: rate for name, rate in rates.items() if rate is not None},
        "memory_gbs": _best(documents, max, "memory", "copy_gbs"),
        "to_device_gbs": _best(documents, max, "host_link", "to_device_gbs"),
        "to_host_gbs": _best(documents, max, "host_link", "to_host_gbs"),
        "launch_us": _best(documents, min, "launch_us"),
        "usable_gb": _best(documents, min, "capacity", "total_gb"),
        "driver_total_gb": _best(documents, min, "capacity", "driver_total_gb"),
    }
    return {name: value for name, value in ceilings.items() if value not in (None, {})}


def tflops(store: Path, gpu_name: str | None, precision: str) -> float | None:
    """Return the highest product rate in TFLOP/s that a probe has seen on a GPU of this name; None where there is
    none."""
    rate: float | None = of(store, gpu_name).get("tflops", {}).get(precision)
    return rate


def _documents(store: Path, gpu_name: str | None) -> list[dict[str, Any]]:
    return [
        document
        for path in sorted((store / FOLDER).glob("*.json"))
        if (document := rundir.read_json(path))
        and isinstance(name := rundir.first_gpu(_section(document, "machine")).get("name"), str)
        and gpu_name is not None
        and canonical_name(name) == canonical_name(gpu_name)
        and _value(document, "device", "kind") == "cuda"
    ]


def _best(documents: list[dict[str, Any]], pick: Any, *keys: str) -> float | None:
    figures = [_value(document, *keys) for document in documents]
    values = [float(value) for value in figures if isinstance(value, (int, float)) and value > 0]
    return pick(values) if values else None


def _section(document: Any, key: str) -> dict[str, Any]:
    section = _value(document, key)
    return section if isinstance(section, dict) else {}


def _value(document: Any, *keys: str) -> Any:
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document
