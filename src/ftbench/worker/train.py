"""One training run, top to bottom: data, model, method, optimizations, trainer, train, evaluate, answer.

`train` names each stage in the order in which it happens; below it stand the stages, and last what a run keeps for its
end. What is done in a stage is done by the module of its name.
"""

import math
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from safetensors import safe_open
from transformers import TrainerCallback, set_seed

from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import RunDir, first_gpu, read_json
from ftbench.worker import methods, optimizations, parallel, trainer
from ftbench.worker.data import order
from ftbench.worker.data.prepare import Prepared, prepare
from ftbench.worker.device import check_device
from ftbench.worker.generate import Answers
from ftbench.worker.measure import applied, controls, forward_parts
from ftbench.worker.measure.batch_count import padding_of
from ftbench.worker.measure.hf_adapter import HfRecording
from ftbench.worker.measure.levels import Levels, Weights
from ftbench.worker.measure.recorder import Recorder
from ftbench.worker.measure.recording import recorder_of, watch_memory
from ftbench.worker.measure.reporter import Reporter
from ftbench.worker.model import loading
from ftbench.worker.model.loading_report import require_complete
from ftbench.worker.model.tokenizer import build_tokenizer
from ftbench.worker.optimizations import cuda_graph
from ftbench.worker.training_run import TrainingRun


def train(run: TrainingRun) -> None:
    """Train the spec and leave applied.json and steps.csv. Raises what goes wrong."""
    spec, phases = run.spec, run.phases
    check_device(first_gpu(read_json(run.directory.machine)))
    method, first = methods.load(spec.method.name), parallel.is_first()

    phases.enter("make_weights")
    source = loading.source_of(spec.model, spec.method, loading.are_drawn(spec))
    phases.enter("prepare_data")
    tokenizer, data = prepared(spec, source)

    phases.enter("load")
    watch_memory(phases)
    with require_complete(spec.model) as weights_left_out:
        model = method.load(spec, source)
        reference = method.load(spec, source) if spec.second_model else None

    phases.enter("setup")
    recorder = run.recorder = recorder_of(spec, run.directory)
    loop = assembled(spec, run.directory, model, tokenizer, data, reference, phases.within)
    _attach(run, loop, recorder)
    facts = applied.of_model(loop.model, spec)
    warnings = [*weights_left_out, *data.warnings, *applied.warnings(loop.model, spec, facts)]
    run.write_facts(**facts, **applied.of_trainer(loop, spec), dataset=data.description, warnings=warnings)
    run.require_applied(method.verify(loop.model, spec))

    answers = Answers(spec, run.directory, tokenizer)
    if spec.measure.generate is not None and first:
        phases.enter("generate")
        answers.ask(loop.model, "before")

    phases.enter("train")
    loop.train()

    phases.enter("finish")
    if data.evaluation and spec.measure.eval == "end" and run.profiler is None:
        loop.evaluate()
    run.finish()
    run.write_facts(
        dataset=data.description | {"order_hash": _hash_of(run, data, recorder)}, padding=padding_of(recorder.shapes),
        gpu_busy_method=recorder.busy_method, **cuda_graph.applied(loop.model, spec),
    )  # fmt: skip
    if spec.measure.generate is not None and first:
        phases.enter("generate")
        answers.ask(loop.accelerator.unwrap_model(loop.model, keep_fp32_wrapper=False), "after")
    if spec.measure.save_adapter:
        phases.enter("save")
        _save(run, loop)
    loop.accelerator.wait_for_everyone()
    shutil.rmtree(run.directory.path / "trainer", ignore_errors=True)


def _save(run: TrainingRun, loop: Any) -> None:
    """Save what was trained. Raise NotAppliedError where some of the adapters are not in the file: a library may leave
    them out without a word."""
    loop.save_model(str(run.directory.adapter))
    if not (parallel.is_first() and run.spec.method.adapters):
        return
    with safe_open(run.directory.adapter / "adapter_model.safetensors", "pt") as file:
        saved = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    trained = run.facts["parameters"]["trainable"]
    if saved < trained:
        run.require_applied([f"measure.save_adapter is on and {saved:,} of {trained:,} weights are saved"])


def _hash_of(run: TrainingRun, data: Prepared, recorder: Recorder) -> str:
    """Return the hash of the tokens in the order of all ranks' batches. Raise NotAppliedError where this rank was not
    trained on its share of them."""
    spec, rank = run.spec, parallel.rank()
    if rank is None:
        return recorder.order_hash
    run.require_applied(order.verify(data.train, spec, recorder.batches, recorder.order_hash, rank))
    return order.token_hash(data.train, spec, recorder.batches * spec.launch.shares)


def prepared(spec: Experiment, source: loading.Source) -> tuple[Any, Prepared]:
    """Return the tokenizer, and the data in the order in which they are trained on."""
    config = loading.load_config(spec.model, source)
    vocabulary = config.get_text_config().vocab_size
    synthetic = spec.dataset.name == "synthetic"
    tokenizer = build_tokenizer(vocabulary) if synthetic else loading.load_tokenizer(spec.model, source)
    pixels = None if synthetic else loading.load_pixels(spec, source, config, tokenizer)
    return tokenizer, prepare(spec, tokenizer, vocabulary, pixels)


def assembled(
    spec: Experiment, directory: RunDir, model: Any, tokenizer: Any, data: Prepared, reference: Any = None,
    within: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> Any:  # fmt: skip
    """Return the trainer, around the loaded model with what its method trains and with its optimizations; a second
    model as `reference` has these too. `within` enters a phase of the run."""
    set_seed(spec.train.seed)
    model.config.use_cache = False
    model = methods.load(spec.method.name).adapt(model, spec)
    optimizations.apply(model, spec)
    if reference is not None:
        optimizations.apply(reference.requires_grad_(False), spec)
    if spec.objective.pairs:
        from ftbench.worker import preference

        loop = preference.build(spec, directory, model, tokenizer, data, reference, within)
    elif spec.objective.prompts:
        from ftbench.worker import policy

        loop = policy.build(spec, directory, model, tokenizer, data)
    else:
        loop = trainer.build(spec, directory, model, tokenizer, data)
    for callback in optimizations.callbacks(spec):
        loop.add_callback(callback)
    return loop


def _attach(run: TrainingRun, loop: Any, recorder: Recorder) -> None:
    """Attach to the trainer what reports, spoils, records, compares, verifies and profiles its steps: each hears of a
    step before the next does."""
    spec, directory, run.trainer = run.spec, run.directory, loop
    run.reporter = Reporter.of(loop, directory, recorder)  # before the recorder: what starts up is not timed
    if spec.measure.control != "off":
        run.write_facts(control=controls.apply(loop, spec))
    weighed_by = "samples" if spec.objective.pairs else "labels"
    loop.recorder = recorder
    recording = HfRecording(recorder, run.phases, weighed_by).attach(loop)
    forward_parts.watch(loop.model, recorder)
    if spec.measure.gradients:
        loop.add_callback(Levels(spec, directory, loop, recording))
    if spec.measure.keep_weights:
        loop.add_callback(Weights(directory))
    loop.add_callback(_AfterFirstStep(run, loop))
    if spec.measure.profile != "off":
        from ftbench.worker.profile.callback import Profiler

        run.profiler = Profiler(spec, directory, loop, recorder.clock)
        loop.add_callback(run.profiler)


class _AfterFirstStep(TrainerCallback):
    """Verifies what was asked for once the first step is done: graphs are compiled, the optimizer has a state."""

    def __init__(self, run: TrainingRun, loop: Any) -> None:
        self._run, self._loop = run, loop

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != 1:
            return
        run, spec = self._run, self._run.spec
        run.write_facts(**applied.of_trainer(self._loop, spec))
        if "warm" in (run.facts["compile_cache"] or ""):
            run.warn("graphs came from the compiler's cache on disk: where it is empty the first step takes longer")
        run.require_applied(optimizations.verify(self._loop.model, spec) + trainer.verify(self._loop, spec))
        if run.recorder:
            run.recorder.restart()  # verifying is no part of the second step
