"""Train one run with trl: data, model, method, optimizations, trainer, training, evaluation.

`train` contains these stages in order. Other modules implement the stages.
"""

import math
import shutil
from typing import Any

from safetensors import safe_open
from transformers import set_seed

from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import first_gpu, read_json
from ftbench.worker import methods, optimizations, parallel, trainer
from ftbench.worker.data.collate import token_hash, verify_order
from ftbench.worker.data.prepare import Prepared, prepare
from ftbench.worker.device import check_device
from ftbench.worker.measure import controls, effective_config, rounded_products
from ftbench.worker.measure.batch_count import padding_of
from ftbench.worker.measure.hf_adapter import HfRecording
from ftbench.worker.measure.levels import Levels, Weights
from ftbench.worker.measure.recorder import Recorder
from ftbench.worker.model import loading
from ftbench.worker.model.parts import base_model, decoder
from ftbench.worker.model.tokenizer import build_tokenizer
from ftbench.worker.model.vision import reads_images
from ftbench.worker.optimizations import cuda_graph
from ftbench.worker.training_run import AfterFirstStep, TrainingRun, recorder_of, require_complete, watch_memory


def train(run: TrainingRun) -> None:
    """Train as the spec requests, and write applied.json and steps.csv."""
    spec, phases = run.spec, run.phases
    check_device(first_gpu(read_json(run.directory.machine)))
    method = methods.load(spec.method.name)

    phases.enter("make_weights")
    source = loading.source_of(spec.model, spec.method, loading.are_drawn(spec), loading.are_packed(spec))
    phases.enter("prepare_data")
    tokenizer, data = prepared(spec, source)

    phases.enter("load")
    watch_memory(phases)
    with require_complete(spec.model) as checkpoint_warnings:
        model = method.load(spec, source)
        reference = method.load(spec, source) if spec.second_model else None

    phases.enter("setup")
    recorder = run.recorder = recorder_of(spec, run.directory)
    loop = build_trainer(run, model, tokenizer, data, reference)
    _attach(run, loop, recorder)
    facts = effective_config.of_model(model := parallel.complete(loop.model))
    warnings = [*checkpoint_warnings, *data.warnings, *effective_config.warnings(model, spec, facts)]
    run.write_facts(**facts, **effective_config.of_trainer(loop, spec), dataset=data.description, warnings=warnings)
    run.require_applied(method.verify(model, spec))

    phases.enter("train")
    loop.train()

    phases.enter("finish")
    if data.evaluation and spec.measure.eval == "end" and run.profiler is None:
        loop.evaluate()
    run.finish()
    _write_final_facts(run, loop, data, recorder)
    if spec.measure.save_adapter:
        phases.enter("save")
        _save(run, loop, data)
    loop.accelerator.wait_for_everyone()
    shutil.rmtree(run.directory.path / "trainer", ignore_errors=True)


def _write_final_facts(run: TrainingRun, loop: Any, data: Prepared, recorder: Recorder) -> None:
    """Write the entries of applied.json that are known only after training."""
    spec = run.spec
    run.write_facts(
        dataset=data.description | {"order_hash": _hash_of(run, data, recorder)}, padding=padding_of(recorder.shapes),
        gpu_busy_method=recorder.sampler and recorder.sampler.busy_method, **cuda_graph.applied(loop.model, spec),
        **(parallel.applied(loop, spec) if spec.launch.pp else {}),  # now with the waiting time of pipeline stages
    )  # fmt: skip


def _save(run: TrainingRun, loop: Any, data: Prepared) -> None:
    """Save the trained weights. Raise NotAppliedError if the library left out some of the adapters."""
    loop.save_model(str(run.directory.adapter))
    if data.pixels and not run.spec.method.adapters:
        data.pixels.save(run.directory.adapter)
    if not (parallel.is_first() and run.spec.method.adapters):
        return
    with safe_open(run.directory.adapter / "adapter_model.safetensors", "pt") as file:
        saved = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    trained = run.facts["parameters"]["trainable"]
    if saved < trained:
        run.require_applied([f"measure.save_adapter is on and {saved:,} of {trained:,} weights were saved"])


def _hash_of(run: TrainingRun, data: Prepared, recorder: Recorder) -> str:
    """Return the SHA-256 of the tokens of all ranks in training order. Raise NotAppliedError if this rank did not train
    on its part of the batches."""
    spec, rank = run.spec, parallel.rank()
    if spec.objective.name == "sft":
        run.require_applied(verify_order(data.train, spec, recorder.batches, recorder.order_hash, rank or 0))
    if rank is None:
        return recorder.order_hash
    return token_hash(data.train, spec, recorder.batches * spec.launch.data_parallel_size)


def prepared(spec: Experiment, source: str) -> tuple[Any, Prepared]:
    """Return the tokenizer, and the data in training order."""
    config = loading.load_config(spec.model, source)
    vocabulary = config.get_text_config().vocab_size
    synthetic = spec.dataset.name == "synthetic"
    tokenizer = build_tokenizer(vocabulary) if synthetic else loading.load_tokenizer(spec.model, source)
    pixels = None if synthetic else loading.load_pixels(spec, source, config, tokenizer)
    return tokenizer, prepare(spec, tokenizer, vocabulary, pixels)


def build_trainer(run: TrainingRun, model: Any, tokenizer: Any, data: Prepared, reference: Any) -> Any:
    """Return the trainer for a loaded model. Apply the method and the optimizations to the model first.

    `reference` is the second model of DPO, or None. The optimizations are also applied to this model.
    """
    spec, directory = run.spec, run.directory
    set_seed(spec.train.seed)
    model.config.get_text_config().use_cache = False  # with a cache, masks ignore the boundaries of packed samples
    model = methods.load(spec.method.name).adapt(model, spec)
    optimizations.apply(model, spec)
    if reference is not None:
        optimizations.apply(reference.requires_grad_(False), spec)
    if spec.launch.pp:
        model = parallel.load(spec.launch.strategy).cut(model, spec)
    if spec.objective.pairs:
        from ftbench.worker import dpo

        loop = dpo.build(run, model, tokenizer, data, reference)
    elif spec.objective.prompts:
        from ftbench.worker import grpo

        loop = grpo.build(spec, directory, model, tokenizer, data)
    else:
        loop = trainer.build(spec, directory, model, tokenizer, data)
    for callback in optimizations.callbacks(spec):
        loop.add_callback(callback)
    return loop


def _attach(run: TrainingRun, loop: Any, recorder: Recorder) -> None:
    """Attach parity controls, recorder, verification and profiler to the trainer. Callbacks run in this order."""
    spec, directory, run.trainer = run.spec, run.directory, loop
    if spec.measure.round_products:
        rounded_products.apply(loop.model, spec.measure.round_scale)
    if spec.measure.control != "off":
        run.write_facts(control=controls.apply(loop, spec))
    weighed_by = "samples" if spec.objective.pairs else "labels"
    loop.recorder = recorder
    recording = HfRecording(recorder, run.phases, weighed_by).attach(loop)
    _mark_forward_parts(loop.model, recorder)
    if spec.measure.gradients:
        loop.add_callback(Levels(spec, directory, loop, recording))
    if spec.measure.keep_weights:
        loop.add_callback(Weights(directory))
    loop.add_callback(AfterFirstStep(run, lambda: _verify(run, loop)))
    if spec.measure.profile != "off":
        from ftbench.worker.profile import Profiler

        run.profiler = Profiler(spec, directory, loop, recorder.clock)
        loop.add_callback(run.profiler)


def _mark_forward_parts(model: Any, recorder: Recorder) -> None:
    """Add hooks that time the encoder, the language model and the loss of a vision model separately."""
    base = base_model(model)
    if not reads_images(base.config):
        return
    inner = base.base_model
    encoder = getattr(inner, "vision_tower", None) or inner.visual
    projector = getattr(inner, "multi_modal_projector", encoder)  # in Qwen models, part of the encoder
    for first, last, name in ((encoder, projector, "vision_s"), (decoder(model), decoder(model), "language_s")):
        first.register_forward_pre_hook(lambda *_: recorder.mark_part(None))
        last.register_forward_hook(lambda *_, name=name: recorder.mark_part(name))
    base.register_forward_hook(lambda *_: recorder.mark_part("loss_s"))


def _verify(run: TrainingRun, loop: Any) -> None:
    """After the first step, write the settings in effect. Raise NotAppliedError if a setting was not applied."""
    run.write_facts(**effective_config.of_trainer(loop, run.spec))
    if "warm" in (run.facts["compile_cache"] or ""):
        run.warn("compiled graphs came from the disk cache: with an empty cache the first step takes longer")
    run.require_applied(optimizations.verify(loop.model, run.spec) + trainer.verify(loop, run.spec))
