"""Convert the work of a step to seconds: `coefficient * work / highest rate` for each kind of work.

The highest rates of a GPU are its ceilings. Ceilings come from a probe in the results folder, from published
measurements, or from the data sheet. The coefficients were fitted to runs (facts/durations.yaml)."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ftbench.core.hardware import Gpu, gpus
from ftbench.errors import SpecError
from ftbench.estimate.time.work import StepWork
from ftbench.facts import read_facts
from ftbench.store import machine

# Shares of the data sheet's rates that large matrix products and memory copies reach, for GPUs without measurements of
# a similar GPU. 0.83 is the median of `gemm_bf16 / bf16` in the GPU table. 0.9 is the usual published ratio of triad
# bandwidth to data sheet bandwidth.
_PRODUCTS, _MEMORY = 0.83, 0.9
NO_FP8 = "no fp8 matrix products on {}: set optimizations.fp8 to off"
# Share of a link's bandwidth that NCCL assumes (src/graph/topo.h): 20.6 of 25 GB/s per NVLink of an H100, 20 of 25 of
# an A100, 24 of 31.5 for PCIe 4.0
_NCCL_SHARE = 0.8
_LINK_GBS = 50.0  # PCIe 5.0 x16, pinned memory: 63 GB/s by its data sheet
_OLDER_LINK_GBS, _PCIE_5 = 25.0, (9, 0)  # PCIe 4.0 x16 of Ampere and Ada: 31.5 GB/s
# A lower power limit lowers clock and voltage: rate = constant * watts ** exponent. In the GPU table, the exponent is
# 0.47 between H100 PCIe and SXM5, and 0.49 between L4 and L40S.
_POWER_EXPONENT = 0.5
# A board with fewer watts per GB/s of bandwidth than this reaches its power limit before its memory bandwidth. The
# value is that of an H100 SXM5. An H200 has 1.43 times the bandwidth with the same 700 W, but `fastest` and
# `fastest-fp8` are only 1.03 and 1.06 times as fast on it (results/h100/records and results/h200/records; both run at
# the power limit).
_WATTS_PER_GBS = 700 / 3350
# Pixel values that ftbench processes per second. The next step starts after its images are processed: in
# results/h100/founding-images, four images of 500 x 500 pixels (20 tiles of 336 x 336) took about 0.06 s.
PIXEL_VALUES_S = 1.0e8
# Share of the GPU's work in a step that belongs to the forward pass. Checkpointed layers compute their forward pass
# twice, and the gradients of their inputs need about as much work as one forward pass.
_FORWARD = 0.3
# Copies that overlap with computation, and the share of the GPU's work during which each copy can run. Weights are
# copied in both passes, and optimizer states in the backward pass, after the weights. The step waits for the rest.
WEIGHTS, STATES = "offload.weights", "offload.states"
OVERLAPS = {WEIGHTS: (_FORWARD, 1 - _FORWARD), STATES: (1 - _FORWARD,)}
# A micro-batch takes `(device**n + host**n) ** (1/n)` seconds. With an infinite n, this is the time of the slower side.
# But the GPU waits during some parts of the step, and the host during others. Of 2, 3, 4 and infinity, 3 has the
# smallest errors in the text study.
OVERLAP = 3.0
# Python operations and kernel launches per second; a fitted coefficient corrects this value. The second value is the
# time per torch operation in µs that `ftbench probe` measured on the host of an H200 (results/h200/recipes/probe). On a
# host with another time, the rate changes in proportion.
HOST_OPERATIONS_S, _LAUNCH_US = 1e5, 6.26


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The highest rates of a GPU in FLOP/s and bytes/s.

    `products` is the rate of 16-bit matrix products, and `source` is its source. `products_fp8` is None without 8-bit
    products. `link` is the rate of copies to the host, and `from_host` of copies from the host. `network` is the rate
    between two GPUs of this kind, or 0 if unknown. The CPU starts `operations` operations per second."""

    products: float
    products_fp8: float | None
    memory: float
    link: float
    from_host: float
    source: str
    network: float = 0.0
    operations: float = HOST_OPERATIONS_S


@dataclass(frozen=True, slots=True)
class Step:
    """The time of one optimizer step in seconds.

    The GPU computes for `device` seconds, and Python works for `host` seconds. `parts` are the shares of each kind of
    work in `seconds`. `host_bound`: Python starts operations, or processes images, for longer than the GPU computes.
    `by_images`: Python spends most time on images."""

    seconds: float
    device: float
    host: float
    parts: Mapping[str, float]
    host_bound: bool
    by_images: bool = False


def has_fp8(gpu: Gpu, store: Path | None) -> bool:
    """Return whether a GPU has 8-bit matrix products, by the GPU table or a probe in the results folder."""
    return gpu.fp8 is not None or bool(store and machine.ceilings(store, gpu.name).get("tflops", {}).get("fp8"))


@lru_cache(maxsize=256)
def limits_of(gpu: Gpu, precision: str, fp8: bool, store: Path | None) -> Ceilings:
    """Return the highest rates of a GPU. `precision` is bf16, fp16 or fp32, as in `train.precision`.

    Raise SpecError if the rate of this precision is unknown. Also raise SpecError for `fp8` on a GPU without 8-bit
    products."""
    probed = machine.ceilings(store, gpu.name) if store else {}
    rates = probed.get("tflops", {})
    board = next((row for row in gpus() if row.name == gpu.name), gpu)  # the board without a lower power limit
    products_fp8, sheet = rates.get("fp8"), gpu.peak_tflops(precision)
    rate, source = rates.get(precision), "ceilings measured by `ftbench probe`"
    if rate is None and sheet is not None:
        rate, source = gpu.gemm_bf16, "ceilings published for this GPU"
        if rate is None:
            rate, source = sheet * _share_of_sheet(board), "ceilings from the data sheet and the board's power"
        rate *= _slowed(gpu.watts / board.watts)
    if rate is None:
        half = "set train.precision to fp16, or " if gpu.fp16 and precision != "fp16" else ""
        why = f"the speed of {gpu.name} in {precision} is not known: {half}run `ftbench probe` on it"
        raise SpecError(f"{why}, and pass the folder to `estimate` or `recommend` with --store")
    if products_fp8 is None and gpu.fp8 is not None:
        products_fp8 = gpu.fp8 * (rate / sheet if sheet else _PRODUCTS)
    if fp8 and products_fp8 is None:
        raise SpecError(NO_FP8.format(gpu.name))
    link = _OLDER_LINK_GBS if (gpu.compute_capability or (0, 0)) < _PCIE_5 else _LINK_GBS
    return Ceilings(
        rate * 1e12,
        None if products_fp8 is None else products_fp8 * 1e12,
        probed.get("memory_gbs", gpu.bandwidth * _MEMORY * _slowed(gpu.watts / gpu.bandwidth / _WATTS_PER_GBS)) * 1e9,
        probed.get("to_host_gbs", link) * 1e9,
        probed.get("to_device_gbs", link) * 1e9,
        source,
        # without peer access, each byte goes through host memory
        (gpu.link or 0.0) * _NCCL_SHARE * (1.0 if gpu.peer_access else 0.5) * 1e9,
        HOST_OPERATIONS_S * _LAUNCH_US / probed.get("launch_us", _LAUNCH_US),
    )


def _share_of_sheet(gpu: Gpu) -> float:
    """Return the share of the data sheet's rate that large matrix products reach on a GPU.

    The share comes from the measured GPU with the most similar watts per TFLOP/s. With fewer watts, the share is
    lower."""
    measured = [other for other in gpus() if other.gemm_bf16 and other.bf16 and other.arch == gpu.arch]
    kind = [other for other in measured if other.compute_capability == gpu.compute_capability] or measured
    if not kind:
        return _PRODUCTS
    power = {other: other.watts / other.bf16 for other in (*kind, gpu) if other.bf16}
    nearest = min(kind, key=lambda other: abs(math.log(power[other] / power[gpu])))
    return (nearest.gemm_bf16 or 0.0) / (nearest.bf16 or 1.0) * _slowed(power[gpu] / power[nearest])


def _slowed(power: float) -> float:
    """Return a GPU's speed as a share of full speed. `power` is `power limit / power that full speed needs`."""
    return float(min(1.0, power) ** _POWER_EXPONENT)


@cache
def shipped_coefficients() -> dict[str, float]:
    """Return the coefficient of each kind of work. The time is `coefficient * work / highest rate`."""
    return {name: term["value"] for name, term in read_facts("durations.yaml")["coefficients"].items()}


def ideal(work: StepWork, limits: Ceilings) -> StepWork:
    """Return the ideal time in seconds of each kind of work in a step: `work / highest rate`."""
    rates = _rates(limits)

    def seconds(terms: Mapping[str, float]) -> dict[str, float]:
        return {name: amount / rates[name] for name, amount in terms.items()}

    groups = tuple((weight, seconds(terms)) for weight, terms in work.groups)
    return StepWork(groups, work.passes, seconds(work.update))


@lru_cache(maxsize=256)
def _rates(limits: Ceilings) -> dict[str, float]:
    """Return the highest rate for each kind of work, in FLOP/s, bytes/s or operations/s. Unknown rates are omitted."""
    rates: dict[str, float | None] = dict.fromkeys(shipped_coefficients(), limits.memory)
    for name in rates:
        if name.startswith(("products", "attention")):  # FLOPs
            rates[name] = limits.products_fp8 if name == "products.fp8" else limits.products
        elif name.startswith("offload"):
            rates[name] = limits.from_host if name in (WEIGHTS, STATES, "offload.head") else limits.link
    known: dict[str, Any] = {name: rate for name, rate in rates.items() if rate is not None}
    return known | {"host": limits.operations, "images": PIXEL_VALUES_S}


def step(ideal_step: StepWork, coefficients: Mapping[str, float]) -> Step:
    """Return the time of a step: images are processed, then GPU and Python work side by side for each micro-batch, and
    then the optimizer updates the weights."""
    parts: dict[str, float] = defaultdict(float)
    device = host = images = seconds = 0.0
    for weight, terms in ideal_step.groups:
        spent = {name: coefficients[name] * value * weight * ideal_step.passes for name, value in terms.items()}
        read, started = spent.pop("images", 0.0), spent.pop("host")
        computed = sum(value for name, value in spent.items() if name not in OVERLAPS)
        copied = spent.get(WEIGHTS, 0.0)
        for name in OVERLAPS.keys() & spent.keys():
            busy = copied if name == STATES else 0.0
            spent[name] = sum(max(0.0, spent[name] - max(0.0, share * computed - busy)) for share in OVERLAPS[name])
        on_device = sum(spent.values())
        both = (on_device**OVERLAP + started**OVERLAP) ** (1 / OVERLAP)
        for name, value in (spent | {"host": started}).items():
            parts[name] += value * ((started if name == "host" else on_device) / both) ** (OVERLAP - 1)
        parts["images"] += read
        device, host, seconds = device + on_device, host + started + read, seconds + both + read
        images += read
    for name, value in ideal_step.update.items():
        parts[name] += (spent_once := coefficients[name] * value)
        device, seconds = device + spent_once, seconds + spent_once
    return Step(seconds, device, host, dict(parts), max(host - images, images) > device, images > host / 2)
