"""`ftbench probe`: measure the peak rates of this machine in a child process, and write them to a file."""

import hashlib
import importlib.util
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftbench.core import units
from ftbench.core.table import folded, text_table
from ftbench.errors import FtbenchError, MissingError
from ftbench.launch import process
from ftbench.store import machine, rundir
from ftbench.store.run_warnings import is_free, usage
from ftbench.store.rundir import first_gpu

SCHEMA = 1
LIMIT_S = 60.0
PRECISIONS = ("bf16", "fp16", "tf32", "fp32", "fp8", "int8")
# Keys of the document. Missing measurements are None, with the reason in `notes`.
_FIGURES = ("device", "products", "memory", "capacity", "host_link", "launch_us", "notes")


def probe(out: Path) -> tuple[dict[str, Any], Path]:
    """Measure this machine within LIMIT_S seconds, and write the results to a file. Return (results, path of the file).

    Raises:
        MissingError: If torch is missing or cannot use the GPU, or if `out` is not writable.
        FtbenchError: If nothing could be measured.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingError(f"probe needs torch, which {sys.executable} does not have: pip install 'ftbench[train]'")
    described = machine.describe()
    folder = out / machine.PROBES
    with rundir.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # fails early if the folder is not writable
        with tempfile.TemporaryDirectory() as scratch:
            measured = _measure(Path(scratch))
    gpu = first_gpu(described)
    notes = [] if is_free(gpu) else [f"the GPU was not free: {usage(gpu)}; stop them and measure again"]
    document = {
        "schema": SCHEMA, "date": rundir.now(), "machine": described, **dict.fromkeys(_FIGURES), **measured,
        "products": {name: measured.get("products", {}).get(name) for name in PRECISIONS},
    }  # fmt: skip
    document["notes"] = [*measured.get("notes", []), *notes]
    path = folder / file_name(described)
    rundir.write_json(path, document)
    return document, path


def _measure(scratch: Path) -> dict[str, Any]:
    """Measure in a child process. Return its results; after a timeout, the results that are already complete."""
    path, log = scratch / "probe.json", scratch / "log.txt"
    late = f"was stopped after {LIMIT_S:.0f} s"
    environment = os.environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONUNBUFFERED": "1"}  # the driver's order
    why = process.run_module("ftbench.worker.probe", [str(path.resolve())], environment, log, LIMIT_S, late)
    document = rundir.read_json(path)
    doing = document.pop("doing", None)
    if missing := document.pop("missing", None):
        raise MissingError(missing)
    if why:
        if not any(document.get("products", {}).values()):
            raise FtbenchError(f"probe: the measuring process {why}; nothing was measured")
        document["notes"] = [*document["notes"], f"{doing}: not measured: the measuring process {why}"]
    return document


def file_name(described: dict[str, Any]) -> str:
    """Return a file name such as `nvidia-h200-1a2b3c4d.json`, with a hash of the GPU's UUID or the host name."""
    gpu = first_gpu(described)
    name = gpu.get("name") or described["cpu"]["model"] or "cpu"
    key = gpu.get("uuid") or platform.node()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
    return f"{slug}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.json"


def as_text(document: dict[str, Any]) -> str:
    """Return the document of a probe as text for the terminal."""
    gpu, cpu, device = first_gpu(document["machine"]), document["machine"]["cpu"], document["device"] or {}
    name = gpu.get("name") or f"{cpu['model'] or 'CPU'}, {device.get('threads') or cpu['threads']} threads"
    versions = document["machine"]["versions"]
    title = [name, f"driver {gpu['driver']}" if gpu.get("driver") else "", f"torch {versions.get('torch', '')}"]
    tflops = units.tflops
    products = [
        [kind, tflops(product["best_tflops"]), str(product["best_size"]), tflops(product["sustained_tflops"])]
        for kind, product in document["products"].items()
        if product
    ]
    return "\n".join([
        " · ".join(part for part in title if part),
        "",
        text_table(("TFLOP/s", ">best", ">at size", ">lasting"), products),
        "",
        text_table(("", ""), list(_others(document))),
        *(folded(f"note: {note}") for note in document["notes"]),
    ])  # fmt: skip


# Rows of the second table: label, section of the document, unit, {key: word in the table}.
_ROWS = (
    ("memory", "memory", "GB/s", {"copy_gbs": "copy", "triad_gbs": "triad"}),
    ("capacity", "capacity", "GiB", {"total_gb": "for processes (CUDA)", "driver_total_gb": "of (NVML)"}),
    ("host link", "host_link", "GB/s", {"to_device_gbs": "to device", "to_host_gbs": "to host"}),
)


def _others(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield rows (label, values) for launch time, memory, capacity and host link."""
    if document["launch_us"] is not None:
        yield "launch", f"{units.rate(document['launch_us'])} µs"
    for label, section, unit, keys in _ROWS:
        show = units.gibibytes if unit == "GiB" else units.rate
        values = [(word, (document[section] or {}).get(key)) for key, word in keys.items()]
        if parts := [f"{word} {show(value)} {unit}" for word, value in values if value is not None]:
            yield label, " · ".join(parts)
