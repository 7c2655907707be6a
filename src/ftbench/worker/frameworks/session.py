"""Second part of a run with another framework, in the framework's interpreter: record the trainer, and read the
settings in effect from the live objects."""

import hashlib
import importlib.metadata
import math
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from datasets import load_from_disk
from transformers import set_seed

from ftbench.errors import FtbenchError
from ftbench.spec.experiment import Experiment
from ftbench.spec.frameworks import FRAMEWORKS
from ftbench.store import machine
from ftbench.store.rundir import first_gpu, read_json, write_json
from ftbench.worker import frameworks, parallel
from ftbench.worker.data.tokens import IGNORE
from ftbench.worker.device import check_device
from ftbench.worker.frameworks import live, own_loop
from ftbench.worker.measure import effective_config
from ftbench.worker.measure.batch_count import COUNT, count_of, padding_of
from ftbench.worker.measure.hf_adapter import HfRecording
from ftbench.worker.measure.recorder import Recorder
from ftbench.worker.training_run import AfterFirstStep, TrainingRun, recorder_of, require_complete, watch_memory


class Trained(BaseException):
    """Exception that leaves the framework after training, before the framework saves, plots and reports."""


def train(run: TrainingRun) -> None:
    """Train with the framework of the spec, and write applied.json and steps.csv."""
    spec, directory = run.spec, run.directory
    check_device(first_gpu(read_json(directory.machine)))
    run.facts = read_json(directory.applied)
    os.chdir(directory.path)
    write_json(directory.machine, read_json(directory.machine) | {"versions": machine.versions()})
    run.phases.enter("load")
    watch_memory(run.phases)
    run.write_facts(framework=_framework_facts(spec))
    with require_complete(spec.model) as weights_left_out:
        values = read_json(directory.framework)
        if FRAMEWORKS[spec.launch.framework].own_loop:
            frameworks.load(spec.launch.framework).record(run, values)
        else:
            train_plain = transformers.Trainer.train
            with suppress(Trained), mock.patch.object(transformers.Trainer, "train", _recorded(run, train_plain)):
                frameworks.load(spec.launch.framework).train(values)
    run.warn(*weights_left_out)
    _check_order(run)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # the other ranks read the files that are deleted below
    if parallel.is_first():
        for made in (frameworks.OUTPUT, "data"):
            shutil.rmtree(made, ignore_errors=True)


def _framework_facts(spec: Experiment) -> dict[str, Any]:
    name, settings = spec.launch.framework, spec.launch.settings
    best = frameworks.load(name).best(spec) if settings == "best" else {}
    version = importlib.metadata.version(FRAMEWORKS[name].package)
    return {"name": name, "version": version, "settings": settings, "switched_on": best}


def _recorded(run: TrainingRun, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Trainer.train` of transformers to record the training. `plain` is the original method."""

    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        spec = run.spec
        run.phases.enter("setup")
        draw_adapters(trainer.model, spec.train.seed)
        recorder = run.recorder = recorder_of(spec, run.directory)
        trainer.data_collator = counted(trainer.data_collator)
        HfRecording(recorder, run.phases).attach(trainer)
        first: list[tuple[int, Any]] = []
        trainer.compute_loss = _without_counts(trainer, first)
        trainer.add_callback(AfterFirstStep(run, lambda: _check_trainer(run, trainer, first)))
        run.write_facts(**effective_config.of_model(trainer.model))
        run.require_applied(live.model_problems(trainer.model, spec))
        run.phases.enter("train")
        plain(trainer, *args, **kwargs)
        run.phases.enter("finish")
        run.finish()
        raise Trained

    return train


@torch.no_grad()
def draw_adapters(model: Any, seed: int) -> None:
    """Set the LoRA matrices to the initial values that trl gives them with the same seed.

    Other frameworks create the matrices at another time, so the first gradient norm would differ. For each adapter,
    peft creates two linear layers with random weights on the CPU. Then peft initializes A again (Kaiming uniform, a =
    sqrt(5)) and sets B to zero. This function draws the same random numbers in the same order.
    """
    set_seed(seed)
    for module in model.modules():
        for name, a in getattr(module, "lora_A", {}).items():
            b = module.lora_B[name]
            drawn = torch.nn.Linear(a.in_features, a.out_features, bias=False)
            torch.nn.Linear(b.in_features, b.out_features, bias=False)
            torch.nn.init.kaiming_uniform_(drawn.weight, a=math.sqrt(5))
            a.weight.copy_(drawn.weight)
            b.weight.zero_()


def _check_trainer(run: TrainingRun, trainer: Any, first: list[tuple[int, Any]]) -> None:
    labels, divisors = zip(*first, strict=True) if first else ((), (None,))
    run.write_facts(**live.of_trainer(trainer, sum(labels), divisors[-1]))
    run.require_applied(live.trainer_problems(trainer, run.spec))


def counted(collate: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap a collator to add token counts to each batch. A packed row is a list of samples."""

    def count(rows: list[Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        samples = [sample for row in rows for sample in ([row] if isinstance(row, dict) else row)]
        ids = [np.asarray(sample["input_ids"], dtype=np.int64) for sample in samples]
        batch = collate(rows, *args, **kwargs)
        labels = int((batch["labels"][..., 1:] != IGNORE).sum())
        batch[COUNT] = count_of(ids, batch["input_ids"].numel(), labels)  # a BatchEncoding supports this too
        return batch

    return count


def _without_counts(trainer: Any, first: list[tuple[int, Any]]) -> Callable[..., Any]:
    """Wrap compute_loss to remove the token counts from a batch. For each micro-batch of the first step, append a pair
    to `first`: the number of label tokens, and the trainer's divisor of the loss."""
    compute = trainer.compute_loss

    def compute_loss(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        count = inputs.pop(COUNT, None)
        if count is not None and trainer.state.global_step == 0:
            first.append((count.labels, kwargs.get("num_items_in_batch")))
        return compute(model, inputs, *args, **kwargs)

    return compute_loss


def _check_order(run: TrainingRun) -> None:
    """Write the hash of the trained tokens to applied.json. Warn if the trainer used other tokens or another order."""
    if (recorder := run.recorder) is None:
        raise FtbenchError(f"{run.spec.launch.framework} ended without training: see log.txt")
    prepared = load_from_disk(frameworks.DATA)["train"]["input_ids"]  # arrays need torchvision in old `datasets`
    of_rank, of_all = _expected_rows(run, len(prepared), recorder)
    same = recorder.order_hash == order_hash_of(prepared, of_rank)
    order_hash = order_hash_of(prepared, of_all) if same else recorder.order_hash
    facts = run.facts.get("dataset", {}) | {"order_hash": order_hash}
    run.write_facts(dataset=facts, padding=padding_of(recorder.shapes))
    if not same:
        name = run.spec.launch.framework
        run.warn(f"not the same work: {name} did not train on the given rows in the given order")


def _expected_rows(run: TrainingRun, count: int, recorder: Recorder) -> tuple[Iterable[int], Iterable[int]]:
    """Return two lists of row numbers in training order: the rows of this rank, and the rows of all ranks."""
    if run.spec.launch.gpus == 1:
        return range(recorder.samples), range(recorder.samples)
    share = parallel.share_of(run.spec.launch, parallel.rank() or 0)
    batches = [rows for step in islice(own_loop.steps_of(run.spec, count), recorder.step) for rows in step]
    of_rank = [row for rows in batches for row in rows[share]]
    return of_rank, [row for rows in batches for each in rows for row in each]


def order_hash_of(prepared: Any, rows: Iterable[int]) -> str:
    """Return the SHA-256 of the tokens in `given[row % len(given)]`, for each number `row` of `rows`."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.asarray(prepared[row % len(prepared)], dtype=np.int64).tobytes())
    return digest.hexdigest()
