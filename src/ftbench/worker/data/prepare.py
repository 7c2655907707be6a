"""A spec's data set → tokenised samples in training order, with the statistics that go into the result."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ftbench.core import lengths
from ftbench.errors import DataError, SpecError
from ftbench.spec.datasets import DATASETS, Dataset
from ftbench.worker.data import synthetic
from ftbench.worker.data.formats import BadRow, Example, detect, example
from ftbench.worker.data.sources import Rows, open_rows
from ftbench.worker.data.tokens import IGNORE, Tokens, tokenise


@dataclass(frozen=True, slots=True)
class Prepared:
    """Samples in the order they are trained on, those set aside for evaluation, and `description`: the `dataset`
    section of the summary."""

    train: list[Tokens]
    evaluation: list[Tokens]
    description: dict[str, Any]
    warnings: list[str]


def prepare(dataset: Dataset, tokenizer: Any, vocab_size: int, batch_size: int) -> Prepared:
    """Reads, draws, formats and tokenises. Raises DataError for rows that cannot be used."""
    warnings: list[str] = []
    if dataset.name == "synthetic":
        samples = synthetic.draw(dataset, (dataset.samples or 0) + dataset.eval_samples, vocab_size)
        left_out = 0
    else:
        samples, left_out = _from_rows(dataset, tokenizer)
        if not tokenizer.chat_template:
            warnings.append("the tokenizer has no chat template: turns are separated by empty lines")
    if left_out:
        warnings.append(f"{left_out} rows of {dataset.name} without text were left out")
    cut = len(samples) - dataset.eval_samples
    train, evaluation = samples[:cut], samples[cut:]
    _check_labels(train, dataset)
    return Prepared(train, evaluation, _describe(dataset, train, evaluation, batch_size), warnings)


def _from_rows(dataset: Dataset, tokenizer: Any) -> tuple[list[Tokens], int]:
    """Rows in the order of a seeded permutation (the one that `datasets.Dataset.shuffle` uses), as many as asked for.
    A row without text is an error in a file, and left out of a public data set."""
    rows = open_rows(dataset)
    format_name = _format(dataset, rows)
    wanted = len(rows) if dataset.samples is None else dataset.samples + dataset.eval_samples
    if wanted > len(rows) or dataset.eval_samples >= wanted:
        raise SpecError(
            f"dataset: {dataset.name} has {len(rows):,} rows, too few for {dataset.samples or 1:,} samples and "
            f"{dataset.eval_samples:,} to evaluate on: lower dataset.samples or dataset.eval_samples"
        )
    if dataset.name == "file":
        for index in range(len(rows)):
            _example(rows, index, format_name)
    samples: list[Tokens] = []
    left_out = 0
    for index in np.random.default_rng(dataset.seed).permutation(len(rows)).tolist():
        if len(samples) == wanted:
            break
        try:
            found = _example(rows, index, format_name)
        except DataError:
            left_out += 1
            continue
        samples.append(tokenise(tokenizer, found, dataset.max_length, dataset.loss_on))
    return samples, left_out


def _format(dataset: Dataset, rows: Rows) -> str:
    if dataset.name == "wikipedia-ja":
        return "wikipedia-title"
    return dataset.format or DATASETS[dataset.name].format or detect(rows[0], rows.where(0))


def _example(rows: Rows, index: int, format_name: str) -> Example:
    try:
        return example(rows[index], format_name)
    except BadRow as error:
        raise DataError(f"{rows.where(index)}: {error} (format {format_name})") from None


def _check_labels(samples: Sequence[Tokens], dataset: Dataset) -> None:
    without = sum(all(label == IGNORE for label in sample.labels[1:]) for sample in samples)
    if without == len(samples):
        raise DataError(
            f"dataset {dataset.name}: no token carries loss within max_length {dataset.max_length}: the prompts "
            "fill it. Raise dataset.max_length or set dataset.loss_on=all"
        )


def _describe(
    dataset: Dataset, train: Sequence[Tokens], evaluation: Sequence[Tokens], batch_size: int
) -> dict[str, Any]:
    real = [len(sample.ids) for sample in train]
    padding = lengths.padding_efficiency(real, batch_size)
    packing = lengths.packing_efficiency(real, max(dataset.max_length, max(real)))
    return {
        "name": dataset.name,
        "samples": len(train),
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
    }


def _hash(samples: Sequence[Tokens]) -> str:
    """SHA-256 of ids and labels in order: equal data sets have equal hashes."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(np.asarray([sample.ids, sample.labels], dtype=np.int64).tobytes())
    return digest.hexdigest()
