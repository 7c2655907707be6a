"""One training run, top to bottom: data, model, method, optimizations, trainer, train, evaluate."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from transformers import TrainerCallback, set_seed

from ftbench.errors import NotAppliedError
from ftbench.machine import handle_of, nvml_module
from ftbench.rundir import RunDir, StepsWriter, read_json, write_json
from ftbench.spec.experiment import Experiment
from ftbench.worker import applied, methods, models, optimizations, trainer
from ftbench.worker.data.prepare import prepare
from ftbench.worker.device import check_device, device
from ftbench.worker.meters import meters
from ftbench.worker.phases import Phases
from ftbench.worker.recorder import Recorder
from ftbench.worker.reporter import Reporter
from ftbench.worker.sampler import Sampler
from ftbench.worker.tokenizer import build_tokenizer


class Run:
    """The objects of a run that its end needs to know, whatever ended it."""

    def __init__(self, spec: Experiment, directory: RunDir, phases: Phases) -> None:
        self.spec, self.directory, self.phases = spec, directory, phases
        self.recorder: Recorder | None = None
        self.reporter: Reporter | None = None
        self.facts: dict[str, Any] = {}

    def position(self) -> tuple[str, int | None]:
        """Where the run is: the phase, or within training the part of the step, and the step."""
        if self.phases.current == "train" and self.recorder and self.recorder.position:
            return self.recorder.position, self.recorder.step or None
        return self.phases.current, None

    def finish(self) -> None:
        """The last rows into steps.csv and to the services; what a service did not take is a warning."""
        if self.recorder:
            self.recorder.finish()
        if self.reporter and (problems := self.reporter.finish()):
            self.write_facts(warnings=[*self.facts.get("warnings", []), *problems])

    def write_facts(self, **more: Any) -> None:
        self.facts |= more
        write_json(self.directory.applied, self.facts)


def train(run: Run) -> None:
    """Trains the spec and leaves applied.json and steps.csv. Raises what goes wrong."""
    spec, phases = run.spec, run.phases
    check_device(read_json(run.directory.machine).get("gpu"))
    method = methods.load(spec.method.name)

    phases.enter("make_weights")
    source = models.source_of(spec.model)
    phases.enter("prepare_data")
    config = models.load_config(spec.model, source)
    vocabulary = config.get_text_config().vocab_size
    synthetic = spec.dataset.name == "synthetic"
    tokenizer = build_tokenizer(vocabulary) if synthetic else models.load_tokenizer(spec.model, source)
    data = prepare(spec, tokenizer, vocabulary)

    phases.enter("load")
    _watch_memory(phases)
    model = method.load(spec, source)

    phases.enter("setup")
    set_seed(spec.train.seed)
    model.config.use_cache = False
    model = method.adapt(model, spec)
    for module in optimizations.modules().values():
        module.apply(model, spec)
    run.recorder = _recorder(run.directory, spec)
    loop = trainer.build(spec, run.directory, model, tokenizer, data, run.recorder)
    run.reporter = Reporter.of(loop, run.directory, run.recorder)  # before the recorder: what starts up is not timed
    loop.attach(run.recorder, phases)
    facts = applied.of_model(loop.model, spec)
    warned = [*data.warnings, *applied.warnings(loop.model, spec, facts)]
    run.write_facts(**facts, **applied.of_trainer(loop, spec), dataset=data.description, warnings=warned)
    _demand(run, method.proof(loop.model, spec))
    if spec.optimizations.gradient_checkpointing == "selective":
        loop.add_callback(optimizations.load("gradient_checkpointing").Selective())
    loop.add_callback(_AfterFirstStep(run, loop))

    phases.enter("train")
    loop.train()

    phases.enter("finish")
    if data.evaluation and spec.measure.eval == "end":
        loop.evaluate()
    run.finish()
    run.write_facts(
        dataset=data.description | {"order_hash": run.recorder.order_hash}, gpu_busy_method=run.recorder.busy_method
    )
    if spec.measure.save_adapter:
        phases.enter("save")
        loop.save_model(str(run.directory.adapter))
    shutil.rmtree(run.directory.path / "trainer", ignore_errors=True)


class _AfterFirstStep(TrainerCallback):
    """Once the first step is done, graphs are compiled and the optimizer has a state: what was asked for is proven."""

    def __init__(self, run: Run, loop: trainer.Trainer) -> None:
        self._run, self._loop = run, loop

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != 1:
            return
        spec = self._run.spec
        self._run.write_facts(**applied.of_trainer(self._loop, spec))
        if "warm" in (self._run.facts["compile_cache"] or ""):
            told = "graphs came from the compiler's cache on disk: where it is empty the first step takes longer"
            self._run.write_facts(warnings=[*self._run.facts["warnings"], told])
        found = [p for module in optimizations.modules().values() for p in module.proof(self._loop.model, spec)]
        _demand(self._run, found + trainer.proof(self._loop, spec))
        self._loop.restart_clock()  # the proof is no part of the second step


def _demand(run: Run, problems: list[str]) -> None:
    """Fails the run for what was asked for and not applied, unless the spec allows it: then it is a warning."""
    if problems and not run.spec.measure.allow_fallback:
        raise NotAppliedError("; ".join(problems) + " (measure.allow_fallback=on measures it all the same)")
    if problems:
        run.write_facts(warnings=[*run.facts["warnings"], *problems])


def _watch_memory(phases: Phases) -> None:
    """From here on each phase tells the memory peak within it."""
    _, memory = meters(device())

    def peaks() -> dict[str, float]:
        read = memory.read()
        memory.reset()
        return {name: read[name] for name in ("peak_memory_gb", "peak_reserved_gb") if name in read}

    phases.read_peaks = peaks


def _recorder(directory: RunDir, spec: Experiment) -> Recorder:
    place = device()
    sampler = None
    if place.type == "cuda" and (nvml := nvml_module()) is not None:
        handle = handle_of(nvml, f"GPU-{torch.cuda.get_device_properties(place).uuid}")
        sampler = Sampler(nvml, handle) if handle is not None else None
    return Recorder(StepsWriter(directory.steps), place, sampler, count_graphs=bool(spec.optimizations.compile))
