"""The second half of a run in another framework, in the framework's interpreter: its trainer is recorded from outside,
and what it really did is read from the live objects."""

import hashlib
import importlib.metadata
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import transformers
from datasets import load_from_disk
from transformers import TrainerCallback

from ftbench.core.units import some
from ftbench.errors import FtbenchError
from ftbench.spec.frameworks import FRAMEWORKS
from ftbench.store import machine
from ftbench.store.rundir import first_gpu, read_json, write_json
from ftbench.worker import frameworks
from ftbench.worker.data.tokens import IGNORE
from ftbench.worker.device import check_device
from ftbench.worker.frameworks import live
from ftbench.worker.frameworks.adapters import draw_adapters
from ftbench.worker.measure import effective_config
from ftbench.worker.measure.batch_count import COUNT, BatchCount, padding_of
from ftbench.worker.measure.hf_adapter import HfRecording
from ftbench.worker.model.diagnosis import require_complete
from ftbench.worker.training_run import TrainingRun, recorder_of, watch_memory


class Trained(BaseException):
    """Leaves a framework once its trainer has trained: what it would save, plot and report is no part of a run."""


def train(run: TrainingRun) -> None:
    """Train through the framework named in the spec and leave applied.json and steps.csv. Raises what goes wrong."""
    spec, directory = run.spec, run.directory
    check_device(first_gpu(read_json(directory.machine)))
    run.facts = read_json(directory.applied)
    os.chdir(directory.path)
    write_json(directory.machine, read_json(directory.machine) | {"versions": machine.versions()})
    run.phases.enter("load")
    watch_memory(run.phases)
    plain, seen = transformers.Trainer.train, Counter[int]()
    transformers.Trainer.train = _recorded(run, plain, seen)
    with require_complete(spec.model) as weights_left_out:
        try:
            frameworks.load(spec.launch.framework).train(read_json(directory.framework))
        except Trained:
            pass
        finally:
            transformers.Trainer.train = plain
    run.warn(*weights_left_out)
    _tell_order(run, seen)
    for made in (frameworks.OUTPUT, "data"):
        shutil.rmtree(made, ignore_errors=True)


def _recorded(run: TrainingRun, plain: Callable[..., Any], seen: Counter[int]) -> Callable[..., Any]:
    """Return transformers' `Trainer.train` with a recorder around the trainer that it is called on: every framework on
    top of transformers comes through here, however it has built its trainer. `seen` counts the rows trained on."""

    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        spec = run.spec
        run.phases.enter("setup")
        draw_adapters(trainer.model, spec.train.seed)
        recorder = run.recorder = recorder_of(spec, run.directory)
        trainer.data_collator = counted(trainer.data_collator)
        HfRecording(recorder, run.phases).attach(trainer)
        check = _RecipeCheck(run, trainer)
        trainer.compute_loss = _counting(trainer.compute_loss, seen, check)
        trainer.add_callback(check)
        name = spec.launch.framework
        version = importlib.metadata.version(FRAMEWORKS[name].package)
        best = frameworks.load(name).best(spec) if spec.launch.settings == "best" else {}
        framework = {"name": name, "version": version, "settings": spec.launch.settings, "switched_on": best}
        run.write_facts(**effective_config.of_model(trainer.model, spec), framework=framework)
        run.require_applied(live.model_problems(trainer.model, spec))
        run.phases.enter("train")
        plain(trainer, *args, **kwargs)
        run.phases.enter("finish")
        run.finish()
        raise Trained

    return train


class _RecipeCheck(TrainerCallback):
    """Reads what the trainer made of its recipe once the first step is done: only then has the optimizer a state."""

    def __init__(self, run: TrainingRun, trainer: Any) -> None:
        self._run, self._trainer = run, trainer
        self._labels, self._divisor = 0, None

    def take(self, labels: int, divisor: Any) -> None:
        """Take the label tokens of a micro-batch, and by what the trainer divides the loss of its step."""
        if self._trainer.state.global_step == 0:
            self._labels, self._divisor = self._labels + labels, divisor

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != 1:
            return
        run = self._run
        run.write_facts(**live.of_trainer(self._trainer, self._labels, self._divisor))
        run.require_applied(live.trainer_problems(self._trainer, run.spec))
        if run.recorder:
            run.recorder.restart()


def counted(collate: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a collator whose batches say what was put into them, on the host, where it costs the device nothing. Where
    a framework packs, a row is a list of them."""

    def count(rows: list[Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        samples = [sample for row in rows for sample in ([row] if isinstance(row, dict) else row)]
        ids = [np.asarray(sample["input_ids"], dtype=np.int64) for sample in samples]
        batch = collate(rows, *args, **kwargs)
        labels = batch["labels"]
        batch[COUNT] = BatchCount(
            real=sum(map(len, ids)),
            padded=batch["input_ids"].numel(),
            labels=int((labels[..., 1:] != IGNORE).sum()),
            samples=len(ids),
            longest=max(map(len, ids)),
            tokens=[row.tobytes() for row in ids],
        )
        return batch

    return count


def _counting(compute: Callable[..., Any], seen: Counter[int], check: _RecipeCheck) -> Callable[..., Any]:
    """Return compute_loss without the counts that travel in a batch, which no model takes; `seen` keeps their rows."""

    def compute_loss(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if (count := inputs.pop(COUNT, None)) is not None:
            seen.update(map(hash, count.tokens))
            check.take(count.labels, kwargs.get("num_items_in_batch"))
        return compute(model, inputs, *args, **kwargs)

    return compute_loss


def _tell_order(run: TrainingRun, seen: Counter[int]) -> None:
    """Say whether the trainer saw the tokens that were handed over, in their order; another order is other work."""
    if (recorder := run.recorder) is None:
        raise FtbenchError(f"{run.spec.launch.framework} ended without having trained: log.txt has what it said")
    facts = run.facts.get("dataset", {}) | {"order_hash": recorder.order_hash}
    run.write_facts(dataset=facts, padding=padding_of(recorder.shapes))
    if recorder.order_hash != handed_order(frameworks.DATA, seen.total()):
        run.warn(f"not the same work: {run.spec.launch.framework} {other_work(frameworks.DATA, seen)}")


def other_work(folder: str, seen: Counter[int]) -> str:
    """Return in words how the rows that were trained on are not the first of those that were handed over."""
    given = Counter(map(hash, _handed(folder, seen.total())))
    left_out, others = (given - seen).total(), seen - given
    changed = sum(others[row] for row in others.keys() - set(map(hash, _handed(folder))))
    said = [f"left out {left_out} of the first {seen.total()} rows that it was given"] if left_out > changed else []
    said += [f"trained on {some(changed, 'row')} not of those that it was given"] if changed else []
    return " and ".join(said) or "trained on the rows that it was given in another order"


def handed_order(folder: str, rows: int) -> str:
    """Return the hash of the tokens of so many rows in their order, from the beginning again after the last."""
    digest = hashlib.sha256()
    for row in _handed(folder, rows):
        digest.update(row)
    return digest.hexdigest()


def _handed(folder: str, rows: int | None = None) -> Iterator[bytes]:
    ids = load_from_disk(folder)["train"]["input_ids"]  # lists: for arrays, older `datasets` ask torchvision
    wanted = range(len(ids) if rows is None else rows)
    return (np.asarray(ids[index % len(ids)], dtype=np.int64).tobytes() for index in wanted)
