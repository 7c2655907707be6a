"""`ftbench probe`: measure the peak rates of this machine in a child process and store them."""

import hashlib
import importlib.util
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.core.hardware import Gpu, find_gpu
from ftbench.core.table import folded, text_table
from ftbench.errors import FtbenchError, MissingError
from ftbench.launch import process
from ftbench.store import machine, rundir
from ftbench.store.rundir import first_gpu

SCHEMA = 1
LIMIT_S = 60.0
# Budget of the child. The rest is for its start and for items that take longer than planned.
_CHILD_S = 55.0
PRECISIONS = ("bf16", "fp16", "tf32", "fp32", "fp8", "int8")
ABOVE_PEAK = 1.05  # cards boost slightly above the clock of the data sheet
THROTTLED = 0.95
FOREIGN_MEMORY_GB = 1.0
# Keys of the document. Missing measurements are None, with the reason in `notes`.
_FIGURES = ("device", "products", "memory", "capacity", "host_link", "launch_us", "idle", "links", "notes")


def probe(out: Path) -> tuple[dict[str, Any], Path]:
    """Measure this machine within LIMIT_S seconds. Return the document and the file below `out` that contains it.

    Raises:
        MissingError: torch is missing or cannot use the GPU, or `out` is not writable.
        FtbenchError: Nothing could be measured.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingError(
            f"probe needs torch, which is not installed for {sys.executable}: pip install 'ftbench[train]'"
        )
    described = machine.describe()
    folder = out / machine.PROBES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # fails early if the folder is not writable
        with tempfile.TemporaryDirectory() as scratch:
            measured = _measure(Path(scratch))
    except OSError as error:
        raise rundir.disk_error(folder, error) from None
    document = {
        "schema": SCHEMA, "date": rundir.now(), "machine": described, **dict.fromkeys(_FIGURES), **measured,
        "products": {name: measured.get("products", {}).get(name) for name in PRECISIONS},
    }  # fmt: skip
    document["notes"] = [*measured.get("notes", []), *remarks(document)]
    path = folder / file_name(described)
    rundir.write_json(path, document)
    return document, path


def _measure(scratch: Path) -> dict[str, Any]:
    """Return the measurements of the child, also if it was stopped early."""
    path, log = scratch / "probe.json", scratch / "log.txt"
    arguments, late = [str(path.resolve()), f"{_CHILD_S:g}"], f"was stopped after {LIMIT_S:.0f} s"
    ended, why = process.run_module("ftbench.worker.probe", arguments, environment(), log, LIMIT_S, late)
    document = rundir.read_json(path)
    doing = document.pop("doing", None)
    if missing := document.pop("missing", None):
        raise MissingError(missing)
    if why:
        if not any(document.get("products", {}).values()):
            raise FtbenchError(f"probe: the measuring process {why}; nothing was measured")
        document["notes"] = [*document["notes"], f"{doing}: not measured: the measuring process {why}"]
    return document | {"wall_s": ended.wall_s}


def environment() -> dict[str, str]:
    """Return the child's environment, with the GPUs in the driver's order."""
    return os.environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONUNBUFFERED": "1"}


def file_name(described: dict[str, Any]) -> str:
    """Return `nvidia-h200-1a2b3c4d.json`, from the GPU's UUID or, without a GPU, from the host name."""
    gpu = first_gpu(described)
    name = gpu.get("name") or described["cpu"]["model"] or "cpu"
    key = gpu.get("uuid") or platform.node()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
    return f"{slug}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"


# --- notes -----------------------------------------------------------------------------------------------------------


def remarks(document: dict[str, Any]) -> list[str]:
    """Return the reasons to doubt the measurements, as sentences."""
    gpu = first_gpu(document["machine"])
    known = find_gpu(gpu["name"]) if gpu.get("name") and (document["device"] or {}).get("kind") == "cuda" else None
    notes = _above_peak(document, known) if known else []
    for name, product in document["products"].items():
        if product and product["sustained_tflops"] < product["best_tflops"] * THROTTLED:
            share = 1 - product["sustained_tflops"] / product["best_tflops"]
            reason = (product.get("throttle") or "none").replace("|", ", ")
            why = "no throttling; make sure that the machine is free" if reason == "none" else f"{reason}, as usual"
            notes.append(f"{name}: the sustained rate is {units.percent(share, 0)} below the best: {why}")
    idle, highest = (document["idle"] or {}).get("sm_clock_mhz"), gpu.get("sm_clock_max_mhz")
    if idle is not None and highest is not None and idle > highest / 2:
        notes.append("idle: the clock was still high, so the idle power is too high: measure again later")
    used, others = gpu.get("memory_used_before_gb"), gpu.get("foreign_processes")
    if others or (used is not None and used > FOREIGN_MEMORY_GB):
        notes.append(
            f"the GPU was not free: {used or 0:.1f} GiB in use, {units.some(others or 0, 'other process')}; stop them "
            "and measure again"
        )
    return notes


def _above_peak(document: dict[str, Any], known: Gpu) -> list[str]:
    measured = {
        name: ((product or {}).get("best_tflops"), known.peak_tflops(name), "TFLOP/s")
        for name, product in document["products"].items()
    }
    memory = document["memory"] or {}
    measured["memory"] = (max(memory.get("copy_gbs") or 0, memory.get("triad_gbs") or 0), known.bandwidth, "GB/s")
    return [
        f"{name}: {value:,.0f} {unit} is {units.percent(value / peak - 1, 0)} above the {peak:,.0f} of the data sheet "
        f"of {known.name}: the card runs above its data sheet, or it is a different GPU"
        for name, (value, peak, unit) in measured.items()
        if value and peak and value > peak * ABOVE_PEAK
    ]


# --- text ------------------------------------------------------------------------------------------------------------


def as_text(document: dict[str, Any]) -> str:
    """Return the document as text."""
    gpu, cpu = first_gpu(document["machine"]), document["machine"]["cpu"]
    device = document["device"] or {}
    name = gpu.get("name") or f"{cpu['model'] or 'CPU'}, {device.get('threads') or cpu['threads']} threads"
    versions = document["machine"]["versions"]
    title = [name, f"driver {gpu['driver']}" if gpu.get("driver") else "", f"torch {versions.get('torch', '')}"]
    return "\n".join([
        " · ".join(part for part in title if part),
        "",
        _products(document["products"]),
        "",
        text_table(("", ""), [row for row in _others(document) if row[1]]),
        *(folded(f"note: {note}") for note in document["notes"]),
    ])  # fmt: skip


def _products(products: dict[str, Any]) -> str:
    """Return a table with one row per precision and without empty columns."""
    headings = ("TFLOP/s", ">best", ">at size", ">lasting", ">clock", ">power")
    rows = [_product(kind, product) for kind, product in products.items() if product]
    kept = [at for at in range(len(headings)) if at < len(headings) - 2 or any(row[at] for row in rows)]
    return text_table([headings[at] for at in kept], [[row[at] for at in kept] for row in rows])


def _product(kind: str, product: dict[str, Any]) -> list[str]:
    best, lasting = (units.tflops(product[name]) for name in ("best_tflops", "sustained_tflops"))
    clock, power = (product.get(name) for name in ("sm_clock_mhz", "power_w"))
    return [
        kind, best, str(product["best_size"]), lasting, "" if clock is None else f"{clock:.0f} MHz",
        "" if power is None else f"{power:.0f} W",
    ]  # fmt: skip


def _others(document: dict[str, Any]) -> list[tuple[str, str]]:
    memory, link, links, has = (document[name] or {} for name in ("memory", "host_link", "links", "capacity"))
    gpu, idle = first_gpu(document["machine"]), document["idle"] or {}
    loaded = [product for product in document["products"].values() if product and product.get("power_w")]
    hottest: dict[str, Any] = max(loaded, key=lambda product: float(product["power_w"]), default={})
    pairs = [pair["gbs"] for pair in links.get("pairs", [])]
    return [
        ("memory", _joined(("copy", memory.get("copy_gbs"), "GB/s"), ("triad", memory.get("triad_gbs"), "GB/s"))),
        ("capacity", _joined(*((label, has.get(name), "GiB") for label, name in _CAPACITY), written=units.gibibytes)),
        ("host link", _joined(("to device", link.get("to_device_gbs"), "GB/s"),
                              ("to host", link.get("to_host_gbs"), "GB/s"))),
        ("launch", _joined(("", document["launch_us"], "µs"))),
        ("power", _joined(("idle", idle.get("power_w"), "W"), ("loaded", hottest.get("power_w"), "W"),
                          ("limit", gpu.get("power_limit_w"), "W"))),
        ("clock", _joined(("idle", idle.get("sm_clock_mhz"), "MHz"), ("loaded", hottest.get("sm_clock_mhz"), "MHz"),
                          ("highest", gpu.get("sm_clock_max_mhz"), "MHz"))),
        ("heat", _joined(("idle", idle.get("temperature_c"), "°C"), ("loaded", hottest.get("temperature_c"), "°C"))),
        (f"{links.get('gpus', 0)} {_ENDS.get(links.get('backend', ''), 'GPUs')}",
         _joined(("all-reduce bus", links.get("all_reduce_bus_gbs"), "GB/s"),
                 ("slowest link", min(pairs, default=None), "GB/s"))),
    ]  # fmt: skip


_ENDS = {"gloo": "processes (gloo)"}  # ends of the links
_CAPACITY = (("for processes (CUDA)", "total_gb"), ("of (NVML)", "driver_total_gb"), ("context", "context_gb"))


def _joined(*parts: tuple[str, float | None, str], written: Callable[[float], str] = units.rate) -> str:
    """Return `copy 4,310 GB/s · triad 4,280 GB/s` without unknown values."""
    return " · ".join(f"{label} {written(value)} {unit}".strip() for label, value, unit in parts if value is not None)
