"""What an estimate says to `run` and `sweep` about the machine that they are on."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftbench.core.hardware import Gpu, limited_gpu
from ftbench.core.units import gibibytes, seconds
from ftbench.errors import FtbenchError
from ftbench.estimate.memory.capacity import machine_gpu
from ftbench.estimate.memory.estimate import MemoryEstimate, estimate_memory
from ftbench.estimate.memory.memory_cache import largest_batch
from ftbench.estimate.time.duration import DurationEstimate, epochs_samples, estimate_duration
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.workload.batches import batches_of, per_step
from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import first_gpu


def announce(
    spec: Experiment,
    described: dict[str, Any],
    store: Path,
    on_doubt: Callable[[str], None],
    on_expected: Callable[[str], None],
) -> None:
    """Tell `on_doubt` why a run will not end well on the machine of a machine.json, or `on_expected` what it will take
    there, by the runs of the results store."""
    gpu = first_gpu(described) or None
    if (text := doubt(spec, described, store)) is not None:
        on_doubt(text)
    elif gpu and (text := expectation(spec, gpu, RunHistory.read(store))) is not None:
        on_expected(text)


def doubt(spec: Experiment, described: dict[str, Any], store: Path) -> str | None:
    """Return why a run will not end well on the machine of a machine.json: no room for it, or days without a GPU."""
    cpu = described.get("cpu") or {}
    if gpu := first_gpu(described):
        return warning(spec, gpu, store, cpu.get("memory_gb"))
    if spec.launch.mock != "off" or not cpu.get("memory_gb"):
        return None
    try:
        memory = estimate_memory(spec, cpu["memory_gb"], total=cpu["memory_gb"])
        lasts = _cpu_seconds(spec, cpu["threads"])
    except FtbenchError:
        return None
    if memory.allocated.low > cpu["memory_gb"]:
        return (
            f"this will run out of memory: it needs {gibibytes(memory.allocated.low)} GiB at the least, and this "
            f"machine has no GPU and {gibibytes(cpu['memory_gb'])} GiB; `ftbench estimate --gpu all` says where it fits"
        )
    if lasts > _LONG_S:
        return (
            f"this will take {seconds(lasts)} at the least: this machine has no GPU, and {cpu['threads']} threads "
            "multiply no faster; `ftbench estimate --gpu all` says how long it takes elsewhere"
        )
    return None


# A core's products in float32 at the most: two units of 16 lanes that multiply and add, at 3.1 GHz (AVX-512).
_CORE_FLOPS, _LONG_S = 2e11, 86_400.0


def _cpu_seconds(spec: Experiment, threads: int) -> float:
    """Return the least seconds of a training's products without a GPU; 0 where the number of steps is not known."""
    store = RunHistory()
    batches = batches_of(spec, store.lengths(spec))
    a_step = per_step(spec, batches, "samples")
    samples = epochs_samples(spec, a_step)
    _, work = store.work(spec, batches, None)
    flops = sum(
        weight * amount for weight, amounts in work.groups for name, amount in amounts.items()
        if name.startswith(("products", "attention"))
    )  # fmt: skip
    return (samples or 0.0) / a_step * work.passes * flops / (threads * _CORE_FLOPS)


def on_machine(spec: Experiment, gpu: dict[str, Any] | None, store: Path | None) -> MemoryEstimate | None:
    """Return the estimate for the GPU of a machine.json, with the memory that the probes of a store saw it give; None
    without one, for a mock, and for a model that no formula knows."""
    if gpu is None or not gpu.get("memory_gb") or spec.launch.mock != "off":
        return None
    try:
        return estimate_memory(spec, machine_gpu(gpu, store), total=gpu["memory_gb"])
    except FtbenchError:
        return None


def first_trial(spec: Experiment, gpu: dict[str, Any] | None, store: Path, most: int) -> int | None:
    """Return the batch at which a search for the largest one is expected to end, at most `most`: its trials have the
    longest samples first, and synthetic data as many samples as it takes."""
    if gpu is None or on_machine(spec, gpu, store) is None:
        return None
    changed: dict[str, Any] = {"longest_first": True}
    if spec.dataset.is_made:
        changed["samples"] = max(spec.dataset.samples or 0, most)
    spec = spec.model_copy(update={"dataset": spec.dataset.model_copy(update=changed)})
    return largest_batch(spec, machine_gpu(gpu, store), likely=True, total=gpu["memory_gb"])


def warning(spec: Experiment, gpu: dict[str, Any] | None, store: Path, host_gb: float | None = None) -> str | None:
    """Return why a run will not fit the GPU of a machine.json, or keeps more in the host's memory than there is."""
    memory = on_machine(spec, gpu, store)
    if gpu is None or memory is None:
        return None
    if memory.verdict == "does not fit":
        largest = largest_batch(spec, machine_gpu(gpu, store), total=gpu["memory_gb"])
        way_out = f"train.batch_size={largest} would fit" if largest else _nearest(spec, machine_gpu(gpu, store))
        return (
            f"this will run out of memory: it needs about {gibibytes(memory.device.expected)} GiB (at least "
            f"{gibibytes(memory.device.low)}) and the GPU has {memory.capacity.words}; {way_out}"
        )
    if not host_gb or memory.host <= host_gb:
        return None
    fewer = "take method qlora, whose weights are a quarter, or " if spec.method.name == "lora" else ""
    return (
        f"this will run out of the host's memory: it keeps about {gibibytes(memory.host)} GiB there, and this machine "
        f"has {gibibytes(host_gb)}; {fewer}set what waits there to off (optimizations.weight_offload, "
        "gradient_checkpointing offload, launch.offload)"
    )


def _nearest(spec: Experiment, gpu: Gpu | float) -> str:
    from ftbench.estimate.recommend.nearest import nearest_fit  # most runs fit

    fit = nearest_fit(spec, gpu)
    if fit is None or fit.spec.launch.gpus != spec.launch.gpus:
        return "`ftbench estimate` shows what takes it"
    return f"{shlex.join(f'--set={value}' for value in fit.sets)} would fit"


def expectation(spec: Experiment, gpu: dict[str, Any] | None, store: RunHistory) -> str | None:
    """Return one line on what a run will take on the GPU of a machine.json: `expected: 77.9 GiB of 140.4, about 4 min
    05 s (scaled from 3 runs …)`; None where nothing is known."""
    spec = store.with_sample_count(spec)
    memory, time = on_machine(spec, gpu, store.path), time_on_machine(spec, gpu, store)
    parts = [f"{gibibytes(memory.device.expected)} GiB of {gibibytes(memory.total)}"] if memory else []
    if time is not None:
        samples = epochs_samples(spec, time.samples)
        lasts = time.step_s if samples is None else time.seconds_for(samples)
        band = f"{seconds(lasts.low)} to {seconds(lasts.high)}"
        each = " a step" if samples is None else ""
        parts.append(f"about {seconds(lasts.expected)}{each} ({band}; {time.confidence})")
    return f"expected: {', '.join(parts)}" if parts else None


def time_on_machine(spec: Experiment, gpu: dict[str, Any] | None, store: RunHistory) -> DurationEstimate | None:
    """Return the time expected here; None without a GPU of the table, for a mock, and where something is not known."""
    known = limited_gpu(gpu)
    if known is None or spec.launch.mock != "off":
        return None
    try:
        return estimate_duration(spec, known, store)
    except FtbenchError:
        return None
