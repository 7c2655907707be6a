"""A simulated run, top to bottom: the worker's own data, model, method, optimizations and trainer, for two steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from transformers import TrainerCallback

from ftbench.spec.experiment import Experiment
from ftbench.spec.objectives import Grpo
from ftbench.store.rundir import RunDir
from ftbench.worker import methods
from ftbench.worker.data.order import Row
from ftbench.worker.data.prepare import Prepared
from ftbench.worker.data.tokens import IGNORE
from ftbench.worker.measure.applied import innermost
from ftbench.worker.measure.batch_count import BatchCount
from ftbench.worker.measure.hf_adapter import HfRecording
from ftbench.worker.model.parts import kept_tensors
from ftbench.worker.simulate.account import account
from ftbench.worker.simulate.functions import log_probs
from ftbench.worker.simulate.generation import completions
from ftbench.worker.simulate.gpu import simulated
from ftbench.worker.simulate.tracker import Tracker, follow_modules
from ftbench.worker.simulate.weights import Shape
from ftbench.worker.train import assembled, prepared

STEPS = 2  # the first makes the optimizer's state, the second runs beside it
MICRO_STEPS = 2  # in the first there are no gradients yet, from the second on there are


def simulate(spec: Experiment, directory: RunDir, capability: tuple[int, int], memory_bytes: int) -> dict[str, Any]:
    """Return simulation.json without its head. Raise SpecError for what cannot be simulated."""
    shape = Shape(spec.model)
    tokenizer, data = prepared(spec, shape)
    batch = heaviest(spec, data)
    short, data = shortened(spec, data, batch)
    with simulated(capability, memory_bytes) as mode:
        tracker = mode.tracker
        method = methods.load(spec.method.name)
        model = method.load(short, shape)
        reference = method.load(short, shape) if spec.second_model else None
        tracker.enter("setup")
        watch = Watch(tracker)
        with _kernels(spec):
            loop = assembled(short, directory, model, tokenizer, data, reference)
        HfRecording(watch).attach(loop)
        loop.add_callback(watch)
        loop.recorder = watch
        watch.model = loop.model
        watch.second = reference
        made = completions(loop) if spec.objective.prompts else nullcontext()
        with follow_modules(loop.model, tracker) as backbone, _kernels(spec), made:
            loop.train()
    result = account(tracker, backbone, int(shape.config.get_text_config().vocab_size))
    return {"batch": _describe(spec, batch)} | result


@contextmanager
def _kernels(spec: Experiment) -> Iterator[None]:
    """Let trl's other trainers take within the block what a GPU takes: its own kernel for log-probabilities."""
    if spec.objective.name == "sft":
        yield
        return
    from trl.trainer import utils

    pairs = _pairs() if spec.objective.pairs else nullcontext()
    with mock.patch.object(utils, "_fused_logprob_entropy", log_probs), pairs:
        yield


@contextmanager
def _pairs() -> Iterator[None]:
    """Let trl's DPOTrainer take within the block a reference that was computed before, which needs less than a step
    does."""
    from trl.trainer import dpo_trainer

    from ftbench.worker.preference import REFERENCE, PairTrainer

    def known(loop: Any, dataset: Any, *_: Any) -> Any:
        for name in REFERENCE:
            dataset = dataset.add_column(name, [0.0] * len(dataset))
        return dataset

    with (
        mock.patch.object(dpo_trainer, "hash_module", return_value=""),
        mock.patch.object(PairTrainer, "_precompute_ref_logps", known),
    ):
        yield


def heaviest(spec: Experiment, data: Prepared) -> list[Row]:
    """Return the batch with the most positions among those that the run will see, and of these the most labels."""
    train, flat = spec.train, spec.optimizations.packing or spec.optimizations.padding_free
    size, passes = train.batch_size, train.gradient_accumulation_steps
    if spec.objective.prompts:  # those of a step
        size, passes = spec.global_batch // spec.objective.group, 1
    batches = [data.train[at : at + size] for at in range(0, len(data.train), size)]
    if train.max_steps:
        batches = batches[: train.max_steps * passes]
    return max(batches, key=lambda rows: (_positions(rows, flat), _labels(rows)))


def _positions(rows: Sequence[Row], flat: bool) -> int:
    lengths = [len(sequence.ids) for row in rows for sequence in row]
    return sum(lengths) if flat else max(lengths) * len(lengths)


def _labels(rows: Sequence[Row]) -> int:
    return sum(label != IGNORE for row in rows for sample in row for label in sample.labels[1:])


def shortened(spec: Experiment, data: Prepared, batch: list[Row]) -> tuple[Experiment, Prepared]:
    """Return the spec and its data cut to the steps that are simulated, each of that batch. The longest row stays among
    the rows that are not trained on: `fixed_shape` pads to it."""
    cut: dict[str, Any] = {"max_steps": STEPS, "report_to": ()}
    if spec.objective.prompts:
        micro_steps = 1  # of the data: all prompts of a step come at once
    else:
        micro_steps = min(MICRO_STEPS, spec.train.gradient_accumulation_steps)
        cut |= {"gradient_accumulation_steps": micro_steps, "batch_size": len(batch)}
    train = spec.train.model_copy(update=cut)
    measure = spec.measure.model_copy(update={"eval": "off"})
    longest = max((*data.train, *data.evaluation), key=lambda row: sum(len(sample.ids) for sample in row))
    rows = replace(data, train=batch * (STEPS * micro_steps), evaluation=[longest])
    changed: dict[str, Any] = {"train": train, "measure": measure}
    if spec.objective.prompts:  # nobody's own functions, which are given texts that nobody wrote
        changed["objective"] = spec.objective.model_copy(update={"reward": None})
    return spec.model_copy(update=changed), rows


def _describe(spec: Experiment, batch: list[Row]) -> dict[str, int]:
    flat = spec.optimizations.packing or spec.optimizations.padding_free
    if spec.objective.prompts:  # with their completions
        size, objective = spec.train.batch_size, cast(Grpo, spec.objective)
        made, longest = objective.max_completion_length, max(len(row[0].ids) for row in batch)
        real = size * made + size * _positions(batch, True) // len(batch)
        return {
            "rows": size, "positions": size * (longest + made), "real_tokens": real, "label_tokens": size * made,
            "longest": longest + made,
        }  # fmt: skip
    return {
        "rows": len(batch),
        "positions": _positions(batch, flat),
        "real_tokens": _positions(batch, True),
        "label_tokens": _labels(batch),
        "longest": max(len(sample.ids) for row in batch for sample in row),
    }


class Watch(TrainerCallback):
    """Stands where the recorder stands in a real run, and is a callback too: tells the tracker in which part of a step
    the trainer is, and what the tensors that outlive a step are."""

    model: Any = None
    second: Any = None

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.memory = SimpleNamespace(peak_gb=lambda: 0.0)

    @property
    def position(self) -> str:
        return self._tracker.phase

    @position.setter
    def position(self, phase: str) -> None:
        self._tracker.enter(phase)

    def start(self, planned_steps: int) -> None:
        self.position = "data"

    def begin_step(self) -> None:
        self._tracker.begin_step()

    def mark_part(self, column: str | None, then: str = "forward") -> None:
        self.position = then

    def micro_batch(self, count: BatchCount, loss: torch.Tensor) -> None:
        self.position = "forward"

    def begin_optimizer(self) -> None:
        self.position = "optimizer"

    def end_step(self, grad_norm: Any, learning_rate: float | None, epoch: float | None) -> None:
        self.position = "data"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell_kept()
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: self._tracker.is_a(p.grad, "gradients"))

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self._tell_kept(innermost(optimizer))

    def _tell_kept(self, optimizer: Any = None) -> None:
        for tensor, kind in kept_tensors(self.model, optimizer):
            self._tracker.is_a(tensor, kind)
        for parameter in self.second.parameters() if self.second is not None else ():
            self._tracker.is_a(parameter, "weights")
