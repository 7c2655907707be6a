"""A spec's data set → tokenised samples in training order, with the statistics that go into the result."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ftbench.core import lengths
from ftbench.core.data_formats import BadRow, Example
from ftbench.core.units import some
from ftbench.errors import DataError, SpecError
from ftbench.spec.datasets import Dataset, row_example, row_format
from ftbench.spec.experiment import Experiment
from ftbench.worker.data import order, synthetic
from ftbench.worker.data.order import Row
from ftbench.worker.data.pictures import read
from ftbench.worker.data.pixels import Pixels
from ftbench.worker.data.sources import Rows, open_rows
from ftbench.worker.data.tokens import (
    IGNORE,
    ShownImages,
    Tokens,
    template_errors,
    tokenise,
    tokenise_pair,
    tokenise_prompt,
)


@dataclass(frozen=True)
class Prepared:
    """Rows in the order they are trained on, those set aside for evaluation, and `description`: the `dataset` section
    of the summary; `pixels` is what makes batches of their images. `longest` is the length in tokens of the longest
    row."""

    train: list[Row]
    evaluation: list[Row]
    description: dict[str, Any]
    warnings: list[str]
    pixels: Pixels | None = None

    @cached_property
    def longest(self) -> int:
        return max(_total([row]) for row in (*self.train, *self.evaluation))

    def most_parts(self, batch_size: int, max_length: int) -> int | None:
        """Return how many samples the fullest batch of `batch_size` rows holds, with those that fill it up, which have
        at most `max_length` tokens; None where every row is one sample."""
        if all(len(row) == 1 for row in (*self.train, *self.evaluation)):
            return None
        return max(
            sum(map(len, batch)) + math.ceil((batch_size * self.longest - _total(batch)) / max_length)
            for rows in (self.train, self.evaluation)
            for batch in (rows[at : at + batch_size] for at in range(0, len(rows), batch_size))
        )

    def most_labels(self, batch_size: int) -> int:
        """Return how many labels the batch of `batch_size` rows has that has most, or a few more."""
        return max(
            sum(label != IGNORE for row in rows[at : at + batch_size] for sample in row for label in sample.labels)
            for rows in (self.train, self.evaluation)
            for at in range(0, len(rows), batch_size)
        )


def _total(rows: Sequence[Row]) -> int:
    return sum(len(sample.ids) for row in rows for sample in row)


def prepare(spec: Experiment, tokenizer: Any, vocab_size: int, pixels: Pixels | None = None) -> Prepared:
    """Read, draw, format, tokenise and order as the spec asks; `pixels` of a model that reads images. Raises DataError
    for rows that cannot be used."""
    dataset, batch_size = spec.dataset, spec.train.batch_size
    count, warnings = (dataset.samples or 0) + dataset.eval_samples, list[str]()
    if dataset.name == "synthetic":
        draw = synthetic.draw_pairs if spec.objective.pairs else synthetic.draw
        samples = draw(dataset, count, vocab_size)
        if spec.objective.prompts:
            samples = [replace(prompt, labels=[IGNORE] * len(prompt.ids)) for prompt in samples]
    elif dataset.name == "images":
        special = {*tokenizer.all_special_ids, _reading(pixels, dataset).token}
        samples = synthetic.draw_images(dataset, count, vocab_size, _reading(pixels, dataset), special)
    else:
        samples, warnings = _from_rows(spec, tokenizer, pixels)
        if not tokenizer.chat_template:
            warnings.append("the tokenizer has no chat template: turns are separated by empty lines")
    cut = len(samples) - dataset.eval_samples
    train, evaluation = samples[:cut], samples[cut:]
    if dataset.longest_first:
        first = spec.global_batch // spec.objective.group if spec.objective.prompts else batch_size
        train = order.longest_first(train, first)
    if spec.optimizations.length_grouping:
        train = order.grouped(train, batch_size, dataset.seed)
    if spec.optimizations.tile_buckets:
        train = order.bucketed(train, _reading(pixels, dataset), batch_size, dataset.seed)
    if spec.measure.control == "random_labels":
        train = synthetic.mislabelled(train, dataset.seed, vocab_size)
    rows = order.packed(train, dataset.max_length) if spec.optimizations.packing else order.rows(train)
    flat = [each for row in rows for each in row]
    description = _describe(dataset, flat, evaluation, batch_size, spec.objective.sequences)
    if pixels and any(sample.pictures for sample in samples):
        description["images"] = _describe_images(train, pixels)
        pixels.keep([picture for sample in samples for picture in sample.pictures])
    return Prepared(rows, order.rows(evaluation), description, warnings, pixels)


def _reading(pixels: Pixels | None, dataset: Dataset) -> Pixels:
    """Return `pixels`. Raises SpecError for a model that reads no images."""
    if pixels is None:
        raise SpecError(f"dataset {dataset.name} holds images, and the model reads none: take one that does")
    return pixels


def _from_rows(spec: Experiment, tokenizer: Any, pixels: Pixels | None) -> tuple[list[Tokens], list[str]]:
    """Read as many rows as wanted, in the order of a seeded permutation (that of `datasets.Dataset.shuffle`).

    A row without text is an error in a file, and left out of a public data set. A sample whose answer lies beyond
    max_length would carry no loss: it is left out and counted, and the next row takes its place.
    """
    dataset = spec.dataset
    rows = open_rows(dataset)
    format_name = row_format(dataset, rows[0], rows.where(0), spec.objective.pairs)
    if dataset.name == "file":
        for index in range(len(rows)):
            row_example(dataset, rows[index], format_name, rows.where(index))
    wanted = len(rows) if dataset.samples is None else dataset.samples + dataset.eval_samples
    samples: list[Tokens] = []
    empty, silent, of_images = 0, 0, False
    for index in np.random.default_rng(dataset.seed).permutation(len(rows)).tolist():
        if len(samples) == wanted:
            break
        try:
            parsed = row_example(dataset, rows[index], format_name, rows.where(index))
            images = _images(rows, index, parsed, dataset, pixels)
        except DataError:
            if dataset.name == "file":
                raise
            empty += 1
            continue
        tokens = _tokens(rows, index, parsed, spec, tokenizer, images)
        whole = images is None or tokens.ids.count(images.token) == sum(images.counts)
        learns = tokens.full_length <= dataset.max_length if spec.objective.prompts else tokens.learns
        if not whole or not learns:
            of_images |= not whole
            silent += 1
            continue
        samples.append(tokens)
    _check_count(spec, len(rows), len(samples), silent, of_images)
    left_out = [
        (empty, "without text or a readable image"),
        (silent, f"whose {_WHAT_IS_BEYOND[spec.objective.prompts]} lies beyond max_length {dataset.max_length}"),
    ]
    return samples, [f"left out: {some(count, 'row')} of {dataset.name} {why}" for count, why in left_out if count]


_WHAT_IS_BEYOND = {False: "answer", True: "prompt's end"}  # by whether the samples are prompts alone


def _check_count(spec: Experiment, rows: int, usable: int, silent: int, of_images: bool) -> None:
    dataset, what = spec.dataset, _WHAT_IS_BEYOND[spec.objective.prompts]
    if not usable and spec.objective.prompts:
        raise DataError(f"dataset {dataset.name}: no prompt ends within max_length {dataset.max_length}: raise it")
    if not usable:
        what, other = (
            ("images", "lower optimizations.image_size") if of_images else ("prompts", "set dataset.loss_on=all")
        )
        raise DataError(
            f"dataset {dataset.name}: no token carries loss within max_length {dataset.max_length}: the {what} fill "
            f"it. Raise dataset.max_length or {other}"
        )
    needed = (dataset.samples or 1) + dataset.eval_samples
    if usable < needed:
        raise SpecError(
            f"dataset: {dataset.name} has {some(rows, 'row')}"
            + (f", {silent:,} of them with their {what} beyond max_length" if silent else "")
            + f": too few for {some(dataset.samples or 1, 'sample')} and {dataset.eval_samples:,} to evaluate on. "
            "Lower dataset.samples or dataset.eval_samples"
        )


def _images(rows: Rows, index: int, parsed: Example, dataset: Dataset, pixels: Pixels | None) -> ShownImages | None:
    """Read the images of an example. Raises DataError that names image and row."""
    if pixels is None and not parsed.images:
        return None
    try:
        return _reading(pixels, dataset).shown([read(reference, rows.folder) for reference in parsed.images])
    except BadRow as error:
        raise DataError(f"{rows.where(index)}: {error}") from None


def _tokens(
    rows: Rows, index: int, parsed: Example, spec: Experiment, tokenizer: Any, images: ShownImages | None
) -> Tokens:
    dataset = spec.dataset
    with template_errors(rows.where(index)):
        if spec.objective.prompts:
            return replace(tokenise_prompt(tokenizer, parsed), row=rows[index])
        if parsed.rejected:
            return tokenise_pair(tokenizer, parsed, dataset.max_length)
        return tokenise(tokenizer, parsed, dataset.max_length, dataset.loss_on, images)


def _describe(
    dataset: Dataset, train: Sequence[Tokens], evaluation: Sequence[Tokens], batch_size: int, sequences: int
) -> dict[str, Any]:
    """Return the `dataset` section; `train` are the sequences in their order, so many of each sample."""
    real = [len(sample.ids) for sample in train]
    padding = lengths.padding_efficiency(real, batch_size * sequences)
    packing = lengths.packing_efficiency(real, max(dataset.max_length, max(real)))
    return {
        "name": dataset.name,
        "samples": len(train) // sequences,
        "eval_samples": len(evaluation),
        "max_length": dataset.max_length,
        "truncated": sum(len(sample.ids) < sample.full_length for sample in train),
        "tokens": lengths.describe(real),
        "tokens_before_truncation": lengths.describe([sample.full_length for sample in train]),
        "label_tokens": sum(label != IGNORE for sample in train for label in sample.labels[1:]),
        "padding_efficiency": padding,
        "packing_efficiency": packing,
        "packing_gain": packing / padding,
        "hash": _hash(train),
    } | ({"entropy_nats": entropy} if (entropy := synthetic.entropy_nats(dataset)) is not None else {})


def _describe_images(samples: Sequence[Tokens], pixels: Pixels) -> dict[str, Any]:
    """Return how many images there are and what they become; `patches` are those that see each other in the encoder."""
    sizes = [pixels.size(picture) for sample in samples for picture in sample.pictures]
    return {
        "count": len(sizes),
        "tokens": lengths.describe([size.tokens for size in sizes]),
        "tiles": sum(size.tiles for size in sizes),
        "patches": lengths.describe([size.patches // size.tiles for size in sizes for _ in range(size.tiles)]),
    }


def _hash(samples: Sequence[Tokens]) -> str:
    """Return the SHA-256 of ids, labels and images in order: equal data sets have equal hashes."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(np.asarray([sample.ids, sample.labels], dtype=np.int64).tobytes())
        digest.update("".join(picture.key for picture in sample.pictures).encode())
    return digest.hexdigest()
