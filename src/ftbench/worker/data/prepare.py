"""Prepare the data set of a spec: tokenize the samples, order them, and describe them for the summary."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ftbench.core import stats
from ftbench.core.data_formats import Example
from ftbench.core.units import some
from ftbench.errors import DataError, SpecError
from ftbench.spec import batches
from ftbench.spec.datasets import Dataset, row_example, row_format, too_few_rows
from ftbench.spec.experiment import Experiment
from ftbench.worker.data import synthetic, tokens
from ftbench.worker.data.images import Pixels, SampleImages, read
from ftbench.worker.data.sources import Rows, open_rows
from ftbench.worker.data.tokens import IGNORE, Row, Tokens


@dataclass(frozen=True)
class Prepared:
    """The data of a run: the training rows in order, and the rows for evaluation."""

    train: list[Row]
    evaluation: list[Row]
    description: dict[str, Any]  # the `dataset` section of the summary
    warnings: list[str]
    pixels: Pixels | None = None

    @cached_property
    def longest(self) -> int:
        """Number of tokens in the longest row."""
        return max(_total([row]) for row in (*self.train, *self.evaluation))

    @cached_property
    def longest_sample(self) -> int:
        """Number of tokens in the longest sample. A packed row has several samples."""
        return max(len(sample.ids) for row in (*self.train, *self.evaluation) for sample in row)

    def most_parts(self, batch_size: int) -> int | None:
        """Return the largest number of samples (also padding-only) in a batch, or None if each row has one sample."""
        if all(len(row) == 1 for row in (*self.train, *self.evaluation)):
            return None
        return max(
            sum(map(len, batch)) + math.ceil((batch_size * self.longest - _total(batch)) / self.longest_sample)
            for batch in self._batches(batch_size)
        )

    def most_labels(self, batch_size: int) -> int:
        """Return the largest number of predicted labels in a batch of `batch_size` rows."""
        return max(
            sum(label != IGNORE for row in batch for sample in row for label in sample.labels[1:])
            for batch in self._batches(batch_size)
        )

    def _batches(self, size: int) -> list[list[Row]]:
        return [rows[at : at + size] for rows in (self.train, self.evaluation) for at in range(0, len(rows), size)]


def _total(rows: Sequence[Row]) -> int:
    return sum(len(sample.ids) for row in rows for sample in row)


def prepare(spec: Experiment, tokenizer: Any, vocab_size: int, pixels: Pixels | None = None) -> Prepared:
    """Read or generate the samples, tokenize them, and order them as the spec requests. Generated token ids are below
    `vocab_size`. A vision model needs the image converter `pixels`. Raise DataError for an unusable row of a file."""
    dataset = spec.dataset
    count, warnings = (dataset.samples or 0) + dataset.eval_samples, list[str]()
    if dataset.name == "synthetic":
        draw = synthetic.draw_pairs if spec.objective.pairs else synthetic.draw
        samples = draw(dataset, count, vocab_size)
        if spec.objective.prompts:
            samples = [replace(prompt, labels=[IGNORE] * len(prompt.ids)) for prompt in samples]
    elif dataset.name == "images":
        special = {*tokenizer.all_special_ids, _require(pixels, dataset).token}
        samples = synthetic.draw_images(dataset, count, vocab_size, _require(pixels, dataset), special)
    else:
        samples, warnings = _from_rows(spec, tokenizer, pixels)
        if not tokenizer.chat_template:
            warnings.append("the tokenizer has no chat template: turns are separated by empty lines")
    cut = len(samples) - dataset.eval_samples
    train, evaluation = samples[:cut], [sample.sequences for sample in samples[cut:]]
    train = _ordered(spec, train)
    rows = packed(train, dataset.max_length) if spec.optimizations.packing else [each.sequences for each in train]
    flat = [each for row in rows for each in row]
    description = _describe(dataset, flat, len(evaluation), spec.objective.sequences)
    if pixels and any(sample.pictures for sample in samples):
        description["images"] = _describe_images(train, pixels)
        pixels.fill_cache([picture for sample in samples for picture in sample.pictures])
    return Prepared(rows, evaluation, description, warnings, pixels)


def _require(pixels: Pixels | None, dataset: Dataset) -> Pixels:
    """Return `pixels`. Raise SpecError if `pixels` is None, because a text model cannot use images."""
    if pixels is None:
        raise SpecError(f"dataset {dataset.name} has images, and the model takes only text: use a vision model")
    return pixels


def _ordered(spec: Experiment, samples: list[Tokens]) -> list[Tokens]:
    dataset, batch_size = spec.dataset, spec.train.batch_size
    if dataset.longest_first:
        first = spec.global_batch // spec.objective.group if spec.objective.prompts else batch_size
        samples = longest_first(samples, first)
    if spec.optimizations.length_grouping:
        samples = grouped(samples, batch_size, dataset.seed)
    return samples


def packed(samples: Sequence[Tokens], max_length: int) -> list[Row]:
    """Return packed rows of at most `max_length` tokens. The rows are in the order of their first samples."""
    return [[samples[index] for index in row] for row in batches.packed([each.longest for each in samples], max_length)]


def grouped(samples: Sequence[Tokens], batch_size: int, seed: int) -> list[Tokens]:
    """Return the samples in batches of similar length. The batches are in random order."""
    return [samples[index] for index in batches.grouped([each.longest for each in samples], batch_size, seed)]


def longest_first(samples: Sequence[Tokens], batch_size: int) -> list[Tokens]:
    """Return the samples, the `batch_size` longest first. Raise SpecError for fewer than `batch_size` samples."""
    if len(samples) < batch_size:
        raise SpecError(
            f"dataset.longest_first needs a full batch of {batch_size} samples, and there are {len(samples):,}: lower "
            "train.batch_size"
        )
    order = sorted(range(len(samples)), key=lambda index: -samples[index].longest)
    return [samples[index] for index in (*order[:batch_size], *sorted(order[batch_size:]))]


def _from_rows(spec: Experiment, tokenizer: Any, pixels: Pixels | None) -> tuple[list[Tokens], list[str]]:
    """Return the requested samples in the order of `datasets.Dataset.shuffle`, and warnings about skipped rows.

    In a file, an unusable row raises an error. In a public data set, an unusable row is skipped. Rows with an answer
    completely beyond `max_length` are also skipped, because they have no loss. The next row replaces a skipped row.
    """
    dataset = spec.dataset
    rows = open_rows(dataset)
    format_name = row_format(dataset, rows[0], rows.where(0), spec.objective.pairs)
    if dataset.name == "file":
        for index in range(len(rows)):
            row_example(dataset, rows[index], format_name, rows.where(index))
    wanted = len(rows) if dataset.samples is None else dataset.samples + dataset.eval_samples
    samples: list[Tokens] = []
    empty, too_long, cut_images = 0, 0, False
    for index in np.random.default_rng(dataset.seed).permutation(len(rows)).tolist():
        if len(samples) == wanted:
            break
        try:
            parsed = row_example(dataset, rows[index], format_name, rows.where(index))
            with tokens.name_errors(rows.where(index)):
                images = None  # for a text model
                if pixels or parsed.images:
                    images = _require(pixels, dataset).of_sample([read(each, rows.folder) for each in parsed.images])
        except DataError:
            empty += 1
            if dataset.name == "file" or empty == len(rows):
                raise
            continue
        sample = _tokenised(rows, index, parsed, spec, tokenizer, images)
        complete = images is None or sample.ids.count(images.token) == sum(images.counts)
        learns = sample.full_length <= dataset.max_length if spec.objective.prompts else sample.learns
        if not complete or not learns:
            cut_images |= not complete
            too_long += 1
            continue
        samples.append(sample)
    _check_count(spec, len(rows), len(samples), too_long, cut_images)
    beyond = f"with the {_CUT[spec.objective.prompts]} beyond max_length {dataset.max_length}"
    skipped = ((empty, "that cannot be used"), (too_long, beyond))
    return samples, [f"skipped {some(count, 'row')} of {dataset.name} {why}" for count, why in skipped if count]


_CUT = {False: "answer", True: "prompt's end"}  # True: the samples are prompts without answers


def _check_count(spec: Experiment, rows: int, usable: int, too_long: int, cut_images: bool) -> None:
    dataset, part = spec.dataset, _CUT[spec.objective.prompts]
    if not usable:
        other = "lower optimizations.image_size" if cut_images else "set dataset.loss_on=all"
        hint = f" or {other}" if spec.objective.name == "sft" else ""
        raise DataError(
            f"dataset {dataset.name}: the {part} of every row is beyond max_length {dataset.max_length}: "
            f"raise dataset.max_length{hint}"
        )
    needed = (dataset.samples or 1) + dataset.eval_samples
    if usable < needed:
        note = f", {too_long:,} of them with the {part} beyond max_length" if too_long else ""
        raise SpecError(too_few_rows(dataset, rows, note))


def _tokenised(
    rows: Rows, index: int, parsed: Example, spec: Experiment, tokenizer: Any, images: SampleImages | None
) -> Tokens:
    dataset = spec.dataset
    with tokens.name_errors(rows.where(index)):
        if spec.objective.prompts:
            return replace(tokens.tokenise_prompt(tokenizer, parsed), row=rows[index])
        if parsed.rejected:
            return tokens.tokenise_pair(tokenizer, parsed, dataset.max_length)
        return tokens.tokenise(tokenizer, parsed, dataset.max_length, dataset.loss_on, images)


def _describe(dataset: Dataset, train: Sequence[Tokens], evaluation: int, sequences: int) -> dict[str, Any]:
    """Return the `dataset` section of the summary. `sequences` is 2 for preference pairs, otherwise 1."""
    return {
        "name": dataset.name,
        "samples": len(train) // sequences,
        "eval_samples": evaluation,
        "max_length": dataset.max_length,
        "truncated": sum(len(sample.ids) < sample.full_length for sample in train),
        "tokens": stats.describe([len(sample.ids) for sample in train]),
        "tokens_before_truncation": stats.describe([sample.full_length for sample in train]),
        "label_tokens": sum(label != IGNORE for sample in train for label in sample.labels[1:]),
        "hash": _hash(train),
    }


def _describe_images(samples: Sequence[Tokens], pixels: Pixels) -> dict[str, Any]:
    """Return statistics of the images: count, tokens, tiles, and patches per tile."""
    sizes = [pixels.size(picture) for sample in samples for picture in sample.pictures]
    return {
        "count": len(sizes),
        "tokens": stats.describe([size.tokens for size in sizes]),
        "tiles": sum(size.tiles for size in sizes),
        "patches": stats.describe([size.patches // size.tiles for size in sizes for _ in range(size.tiles)]),
    }


def _hash(samples: Sequence[Tokens]) -> str:
    """Return the SHA-256 of the token ids, labels and images of all samples in order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(np.asarray([sample.ids, sample.labels], dtype=np.int64).tobytes())
        digest.update("".join(picture.key for picture in sample.pictures).encode())
    return digest.hexdigest()
