"""The interface of the estimator for the commands run, sweep, report, list and doctor.

Commands import this module inside functions. If the import fails, a command reports that predictions are missing."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from ftbench.core.hardware import limited_gpu
from ftbench.core.units import gibibytes, seconds
from ftbench.errors import FtbenchError
from ftbench.estimate.gpus import machine_gpu
from ftbench.estimate.memory.estimate import MemoryEstimate
from ftbench.estimate.memory.largest_batch import MemoryCache
from ftbench.estimate.time.duration import DurationEstimate, estimate_duration
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.workload.batches import epochs_samples
from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import first_gpu


class Predictor:
    """Predict the memory and time of many specs on one GPU, from the runs and probes of a results folder."""

    def __init__(self, gpu: dict[str, Any], folder: Path) -> None:
        self._gpu, self._history, self._cache = gpu, RunHistory.read(folder), MemoryCache(gpu.get("memory_gb"))

    def predict(self, spec: Experiment) -> tuple[MemoryEstimate | None, DurationEstimate | None, float | None]:
        """Return (memory estimate, time estimate, wall time in seconds) of a run. Unknown values are None."""
        with suppress(FtbenchError):  # the file has too few rows
            spec = self._history.with_sample_count(spec)
        memory = memory_on_machine(spec, self._gpu, self._history.path, self._cache)
        time = time_on_machine(spec, self._gpu, self._history)
        samples = epochs_samples(spec, time.samples) if time else None
        return memory, time, time.seconds_for(samples).expected if time and samples is not None else None


def memory_on_machine(
    spec: Experiment, gpu: dict[str, Any] | None, store: Path | None, cache: MemoryCache | None = None
) -> MemoryEstimate | None:
    """Return the estimated memory on this GPU. Return None without a GPU, for a mock run, and for an unknown model."""
    with suppress(FtbenchError):
        if gpu is not None and gpu.get("memory_gb") and spec.launch.mock == "off":
            return (cache or MemoryCache(gpu["memory_gb"])).estimate(spec, machine_gpu(gpu, store))
    return None


def time_on_machine(spec: Experiment, gpu: dict[str, Any] | None, history: RunHistory) -> DurationEstimate | None:
    """Return the estimated time on this GPU. Return None for a mock run, and for an unknown GPU, model or speed."""
    with suppress(FtbenchError):
        if (known := limited_gpu(gpu)) is not None and spec.launch.mock == "off":
            return estimate_duration(spec, known, history)
    return None


def first_trial(spec: Experiment, gpu: dict[str, Any] | None, store: Path, most: int) -> int | None:
    """Return the first batch size to try in a search for the largest batch: the largest that is expected to fit.

    The result is at most `most`. The search trains the longest samples first."""
    if gpu is None or memory_on_machine(spec, gpu, store) is None:
        return None
    spec = spec.model_copy(update={"dataset": spec.dataset.model_copy(update={"longest_first": True})})
    return MemoryCache(gpu["memory_gb"]).largest_batch(spec, machine_gpu(gpu, store), likely=True, most=most)


def problem(spec: Experiment, described: dict[str, Any], store: Path) -> str | None:
    """Return an error message if a machine has too little memory for a run, or None. `described` is a machine.json."""
    gpu, host_gb = first_gpu(described) or None, (described.get("cpu") or {}).get("memory_gb")
    memory = memory_on_machine(spec, gpu, store)
    if gpu is None or memory is None:
        return None
    if memory.verdict == "does not fit":
        largest = MemoryCache(gpu["memory_gb"]).largest_batch(spec, machine_gpu(gpu, store))
        solution = f"train.batch_size={largest} would fit" if largest else "`ftbench recommend` finds settings that fit"
        return (
            f"this will run out of memory: it needs about {gibibytes(memory.device.expected)} GiB (at least "
            f"{gibibytes(memory.device.low)}) and the GPU has {memory.capacity.words}; {solution}"
        )
    if not host_gb or memory.host <= host_gb:
        return None
    fewer = "use method qlora, whose weights are a quarter as large, or " if spec.method.name == "lora" else ""
    return (
        f"this will run out of host memory: it keeps about {gibibytes(memory.host)} GiB there, and this machine has "
        f"{gibibytes(host_gb)}; {fewer}switch off offloading (optimizations.weight_offload, gradient_checkpointing "
        "offload, launch.offload)"
    )


def expectation(spec: Experiment, gpu: dict[str, Any] | None, store: Path) -> str | None:
    """Return one line such as `expected: 77.9 GiB of 140.4, about 4 min 05 s (...)`, or None without a prediction."""
    if gpu is None:
        return None
    history = RunHistory.read(store, spec, [gpu["name"]])
    spec = history.with_sample_count(spec)
    memory, time = memory_on_machine(spec, gpu, store), time_on_machine(spec, gpu, history)
    parts = [f"{gibibytes(memory.device.expected)} GiB of {gibibytes(memory.total)}"] if memory else []
    if time is not None:
        samples = epochs_samples(spec, time.samples)
        band, each = (time.step_s, " per step") if samples is None else (time.seconds_for(samples), "")
        span = f"{seconds(band.low)} to {seconds(band.high)}"
        parts.append(f"about {seconds(band.expected)}{each} ({span}; {time.confidence})")
    return f"expected: {', '.join(parts)}" if parts else None
