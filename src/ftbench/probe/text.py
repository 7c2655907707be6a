"""Print the results of `ftbench probe`."""

from collections.abc import Callable
from typing import Any

from ftbench.core import units
from ftbench.core.table import folded, text_table
from ftbench.store.rundir import first_gpu


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
