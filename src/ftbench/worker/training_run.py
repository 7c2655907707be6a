"""The state and the recorder of a run, used by all training loops.

This module must not import trl, because environments of other frameworks have other versions of trl.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel, TrainerCallback

from ftbench.core.units import listed
from ftbench.errors import MissingError, NotAppliedError
from ftbench.spec.experiment import Experiment, Model
from ftbench.store.machine import handle_of, nvml_module
from ftbench.store.rundir import RunDir, gpus_of, read_json, write_json
from ftbench.store.steps import StepsWriter
from ftbench.worker import parallel
from ftbench.worker.device import device
from ftbench.worker.measure.meters import Sampler, meters
from ftbench.worker.measure.recorder import Recorder
from ftbench.worker.measure.utilization import GpuLoad, HostLoad, own_processes
from ftbench.worker.outcome import Phases

_SHOWN = 3


class TrainingRun:
    """The objects that are needed to finish a run after success or failure."""

    def __init__(self, spec: Experiment, directory: RunDir, phases: Phases) -> None:
        self.spec, self.directory, self.phases = spec, directory, phases
        self.recorder: Recorder | None = None
        self.profiler: Any = None
        self.trainer: Any = None
        resolved = read_json(directory.applied).get("resolved")  # written by the parent
        self.facts: dict[str, Any] = {"resolved": resolved} if resolved else {}

    def position(self) -> tuple[str, int | None]:
        """Return the part of the step and the step number during training. Otherwise, return the phase and None."""
        if self.phases.current == "train" and self.recorder and self.recorder.position:
            return self.recorder.position, self.recorder.step or None
        return self.phases.current, None

    def finish(self) -> None:
        """Stop the data loaders, and write the last rows of steps.csv."""
        if self.trainer:
            for iterator in self.trainer.loaders():
                iterator._shutdown_workers()
        if self.recorder:
            self.recorder.finish()

    def write_facts(self, **more: Any) -> None:
        """Add entries to applied.json."""
        self.facts |= more
        if "model" in more and self.spec.optimizations.attention == "auto":
            chosen = {"value": more["model"]["attention"], "reason": f"the default of {more['model']['class']}"}
            self.facts["resolved"] = {**self.facts.get("resolved", {}), "optimizations.attention": chosen}
        write_json(self.directory.applied, self.facts)

    def warn(self, *warnings: str) -> None:
        """Add warnings to applied.json."""
        if warnings:
            self.write_facts(warnings=[*self.facts.get("warnings", []), *warnings])

    def require_applied(self, problems: list[str]) -> None:
        """Raise NotAppliedError if there are problems. With `measure.allow_fallback`, write warnings instead."""
        if problems and not self.spec.measure.allow_fallback:
            raise NotAppliedError("; ".join(problems) + " (set measure.allow_fallback=on to measure anyway)")
        self.warn(*problems)


class AfterFirstStep(TrainerCallback):
    """Calls `check` after the first step, when graphs are compiled and the optimizer has a state."""

    def __init__(self, run: TrainingRun, check: Callable[[], None]) -> None:
        self._run, self._check = run, check

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self._check()
            if self._run.recorder:
                self._run.recorder.restart()  # the check is not part of the second step


def watch_memory(phases: Phases) -> None:
    """Record the memory peak of each phase from now on."""
    _, memory = meters(device())

    def peaks() -> dict[str, float]:
        values = memory.read()
        memory.reset()
        return {name: values[name] for name in ("peak_memory_gb", "peak_reserved_gb") if name in values}

    phases.read_peaks = peaks


def recorder_of(spec: Experiment, directory: RunDir) -> Recorder:
    """Return a recorder for this process. Its sampler reads the counters of the host and of this process's GPU."""
    gpu, others = device(), list[HostLoad | GpuLoad]([HostLoad()])
    nvml = nvml_module() if gpu.type == "cuda" else None
    handle = nvml and handle_of(nvml, uuid := f"GPU-{torch.cuda.get_device_properties(gpu).uuid}")
    if handle is not None:
        gpus = [each for file in directory.path.glob("machine*.json") for each in gpus_of(read_json(file))]  # all nodes
        before = {pid for each in gpus if each.get("uuid") == uuid for pid in each.get("process_ids") or ()}
        others += [GpuLoad(nvml, handle, own)] if (own := own_processes(nvml, handle, before)) else []  # else unknown
    sampler = Sampler(nvml if handle is not None else None, handle, others)
    rank = parallel.rank()
    data_rank = None if rank is None else parallel.share_of(spec.launch, rank)
    writer, count_graphs = StepsWriter(directory.steps), bool(spec.optimizations.compile)
    return Recorder(writer, gpu, sampler, count_graphs, rank or 0, data_rank)


@contextmanager
def require_complete(model: Model) -> Iterator[list[str]]:
    """Check the loading report of every `from_pretrained` call in this context. Yield the list of warnings.

    Raises:
        MissingError: Weights are missing in the checkpoint or have another shape. transformers would use random weights
            instead, and the run would not train the published model.
    """
    warnings: list[str] = []
    load = getattr(PreTrainedModel.from_pretrained, "__func__", None)
    if load is None:  # a library replaced the class method
        yield warnings
        return

    def from_pretrained(cls: Any, /, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        loaded, report = load(cls, *args, output_loading_info=True, **({"ignore_mismatched_sizes": True} | kwargs))
        _require(model, loaded, report)
        if unexpected := report["unexpected_keys"]:
            ignored = listed(sorted(unexpected), _SHOWN)
            warnings.append(f"{type(loaded).__name__} ignores these weights of the checkpoint: {ignored}")
        return (loaded, report) if output_loading_info else loaded

    with mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(from_pretrained)):
        yield warnings


def _require(model: Model, loaded: Any, report: dict[str, Any]) -> None:
    names = {name for named in (loaded.named_parameters, loaded.named_buffers) for name, _ in named()}
    name = model.path or model.id
    if missing := names & set(report["missing_keys"]):  # weights of replaced layers do not count
        raise MissingError(
            f"model {name}: the checkpoint lacks weights of {type(loaded).__name__}, which would be random: "
            f"{listed(sorted(missing), _SHOWN)}. Complete its files, or set model.weights=random to measure the same "
            "shape without them"
        )
    if mismatched := report["mismatched_keys"]:
        shapes = sorted({f"{key} ({list(actual)}, not {list(wanted)})" for key, actual, wanted in mismatched})
        raise MissingError(
            f"model {name}: weights of the checkpoint have other shapes than config.json: {listed(shapes, _SHOWN)}. "
            "Take both from one model, or set model.weights=random to measure the shape of config.json"
        )
