"""The samples of parity's recording runs and of packed trainings, and the result files of a training."""

from dataclasses import dataclass
from typing import Any

from ftbench import families
from ftbench.spec.batches import packed, picture_sizes, synthetic_lengths
from ftbench.spec.datasets import Dataset
from ftbench.spec.experiment import Experiment
from ftbench.spec.methods import configuration
from ftbench.store.rundir import RunDir
from ftbench.store.steps import read_steps
from ftbench.sweep.verdict import FAIL, INCONCLUSIVE

SAME_SIZE = 0.15  # maximum relative difference of the number of samples in two trainings


def same_samples(spec: Experiment) -> dict[str, Any]:
    """Return changes for packing, so that a step trains about as many samples as a padded one: other rows per step and
    a shorter maximum length. Only generated data have known lengths."""
    if not spec.optimizations.packing or not spec.dataset.is_made:
        return {}
    every = _lengths(spec)
    lengths = every[: spec.dataset.samples]
    steps, tokens = len(lengths) / spec.train.batch_size, spec.train.batch_size * sum(lengths) / len(lengths)
    shortest, longest = max(every), spec.dataset.max_length
    choices = {}
    for rows in range(max(1, int(tokens / longest)), int(tokens / shortest) + 2):
        for room in (1.0, 1.03, 1.06, 1.1, 1.2):
            length = min(longest, max(shortest, round(room * tokens / rows)))
            choices[rows, length] = abs(len(packed(lengths, length)) / rows / steps - 1)
    rows, length = min(choices, key=lambda choice: choices[choice])
    return {"train.batch_size": rows, "dataset.max_length": length}


def _lengths(spec: Experiment) -> list[int]:
    """Return the tokens of each generated sample, held-out ones too, with its images and a token after each of them."""
    dataset = spec.dataset
    texts = synthetic_lengths(dataset, (dataset.samples or 1) + dataset.eval_samples)
    vision = families.describe(dict(configuration(spec.model))).vision if dataset.has_images else None
    if vision is None:
        return texts
    shown = dataset.images_per_sample
    images = [vision.size(high, wide).tokens + 1 for wide, high in picture_sizes(dataset, len(texts) * shown)]
    return [text + sum(images[at * shown : (at + 1) * shown]) for at, text in enumerate(texts)]


def probe(spec: Experiment, batch: int) -> Dataset:
    """Return the samples of a recording run: two batches of the reference and one more, so that the last is not full.
    Files of images are the spec's own. Others are the built-in tasks: prompts, unequal lengths, samples that leak
    without masks."""
    count = max(9, 2 * batch + 1)
    if spec.dataset.has_images:
        structure = "tasks" if spec.dataset.is_made else "random"
        return spec.dataset.model_copy(update={"samples": count, "eval_samples": 0, "structure": structure})
    longest = spec.dataset.max_length
    return Dataset(name="synthetic", structure="tasks", samples=count, max_length=longest, seed=spec.dataset.seed,
                   mean_length=max(8.0, min(longest / 8, 100.0)))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Training:
    """The files of a training: its last held-out loss (NaN if missing), samples and learning rates."""

    held_out: float
    samples: float
    rates: tuple[float | None, ...]

    @classmethod
    def read(cls, run: RunDir) -> "Training":
        rows = read_steps(run.steps)[0]
        losses = [row.loss for row in rows if row.phase == "evaluate" and row.loss is not None]
        steps = [row for row in rows if row.phase == "train"]
        rates, samples = tuple(row.learning_rate for row in steps), sum(row.samples or 0.0 for row in steps)
        return cls(losses[-1] if losses else float("nan"), samples, rates)

    def difference(self, other: "Training") -> tuple[str, str] | None:
        """Return state and sentence if another training had other samples or another schedule."""
        if abs(other.samples - self.samples) > SAME_SIZE * self.samples:
            sentence = f"it trained {other.samples:,.0f} samples and the reference {self.samples:,.0f}"
            return INCONCLUSIVE, f"{sentence}: change train.batch_size"
        pairs = zip(self.rates, other.rates, strict=False)
        for step, (x, y) in enumerate(pairs, 1):
            if x is not None and y is not None and abs(y - x) > 1e-6 * x:
                return FAIL, f"its learning rate in step {step} is {y:.4g}, and plain's is {x:.4g}"
        return None
