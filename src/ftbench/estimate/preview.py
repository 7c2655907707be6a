"""`ftbench data`: show a spec's data set, without training and without a GPU."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ftbench.core import stats, units
from ftbench.core.data_files import read_file
from ftbench.core.data_formats import Example, with_markers
from ftbench.core.processes import run_program
from ftbench.core.table import folded
from ftbench.errors import MissingError, SpecError
from ftbench.estimate.workload.batches import batches_of, per_step
from ftbench.estimate.workload.images import KnownSamples, known_samples
from ftbench.estimate.workload.lengths import MOST_SAMPLES, Lengths, file_lengths, lengths_of, shuffled
from ftbench.estimate.workload.model import shape_of
from ftbench.facts import SAMPLE
from ftbench.spec.batches import packed as packed_rows
from ftbench.spec.datasets import Dataset, check_file, row_example, row_format
from ftbench.spec.experiment import Experiment
from ftbench.spec.load import load

_LETTERS = 600  # maximum number of characters to show per sample
_EXPORT_S = 3600.0  # seconds; enough to download gigabytes over a slow connection
_ONE_ANSWER = ("alpaca", "prompt-completion", "question-answer")  # formats with one answer, after the question


def preview(spec_path: Path, sets: Sequence[str]) -> dict[str, Any]:
    """Return sample lengths, truncation, padding, packing gain and three samples of a spec's data set.

    Raises:
        DataError: ftbench cannot use the rows of the data set.
        MissingError: A data set of the Hugging Face Hub cannot be loaded."""
    spec = load(spec_path, sets)
    dataset, images = spec.dataset, _with_images(spec)
    if dataset.is_generated:
        known = lengths_of(dataset, pairs=spec.objective.pairs, prompts=spec.objective.prompts)
        values, source = (images.lengths, images.basis) if images else (known.values, known.source)
        return _document(spec, values, source, dataset.samples or len(values), "synthetic tokens", [], images=images)
    if dataset.path or dataset.name == "sample":
        return _of_file(spec, dataset, images)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / f"{dataset.name.replace('/', '-')}.jsonl"
        counted = _exported(dataset, spec.objective.pairs, out)
        local = Dataset(name="file", path=str(out), max_length=dataset.max_length, samples=dataset.samples)
        return _of_file(spec, local, images) | counted


def _with_images(spec: Experiment) -> KnownSamples | None:
    """Return the samples with images of a spec. Return None without images, or if the model is text-only or unknown."""
    try:
        vision = shape_of(spec.model).vision
    except SpecError:  # the model is not known
        return None
    return known_samples(spec, vision, fitting=False) if vision else None


def _exported(dataset: Dataset, pairs: bool, out: Path) -> dict[str, Any]:
    """Write rows of a Hub data set to the file `out`. Return {"rows": number of all rows, "format": row format}."""
    command = [sys.executable, "-P", "-m", "ftbench.worker.data.sources", dataset.model_dump_json(), str(out)]
    try:
        ended = run_program([*command, str(MOST_SAMPLES), *(["pairs"] if pairs else [])], _EXPORT_S)
    except OSError as error:
        why = f"not read within {_EXPORT_S:g} s" if isinstance(error, TimeoutError) else f"its child {error.strerror}"
        raise MissingError(f"dataset {dataset.name}: {why}") from None
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or ["it ended without a message"]
        raise MissingError(said[-1] if "Traceback" not in ended.stderr else f"dataset {dataset.name}: {said[-1]}")
    counted: dict[str, Any] = json.loads(out.with_suffix(".count").read_text())
    return counted


def _of_file(spec: Experiment, dataset: Dataset, images: KnownSamples | None) -> dict[str, Any]:
    path = Path(dataset.path or SAMPLE)
    pairs = spec.objective.pairs
    check_file(dataset, spec.model, pairs)
    rows = read_file(path)
    format_name = row_format(dataset, rows[0], rows.where(0), pairs)
    counted = file_lengths(dataset, spec.model, pairs, spec.objective.prompts)
    assert not isinstance(counted, str)  # the file exists
    shown = sorted({0, len(rows) // 2, len(rows) - 1})
    parsed = [row_example(dataset, rows[index], format_name, rows.where(index)) for index in shown]
    parsed = [replace(each, messages=each.question) for each in parsed] if spec.objective.prompts else parsed
    samples = [{"row": index + 1, "text": _rendered(each)} for index, each in zip(shown, parsed, strict=True)]
    values, source = (images.lengths, images.basis) if images else (counted.values, counted.source)
    masked = spec.dataset.loss_on != "all" and not (images or spec.objective.prompts)
    questions = file_lengths(dataset, spec.model, prompts=True) if masked and format_name in _ONE_ANSWER else ""
    cut = [] if isinstance(questions, str) else [value >= dataset.max_length for value in questions.values]
    return _document(spec, values, source, len(rows), format_name, samples, images, sum(cut) / max(len(cut), 1))


def _document(
    spec: Experiment, values: Sequence[int], source: str, rows: int, format_name: str, samples: list[dict[str, Any]],
    images: KnownSamples | None = None, answers_cut: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """Return the JSON document of `preview`. `values` are the sample lengths in tokens before truncation. `answers_cut`
    is the share of samples whose answer is beyond max_length; a training skips them."""
    prompts, longest = spec.objective.prompts, spec.dataset.max_length
    batch = spec.global_batch // spec.objective.group if prompts else spec.train.batch_size * spec.objective.sequences
    kept = [min(value, longest) for value in values if not prompts or value <= longest] or [longest]
    padded = stats.padding_efficiency(kept, batch) if prompts else _real_share(spec, kept, images)
    packed = sum(kept) / (longest * len(packed_rows(kept, longest)))
    return {
        "schema": 1, "dataset": spec.dataset.name, "rows": rows, "format": format_name, "source": source,
        "tokens": stats.describe(values), "max_length": longest,
        "truncated_samples": sum(value > longest for value in values) / len(values),
        "truncated_tokens": 1 - sum(kept) / sum(values), "mean_kept": sum(kept) / len(kept), "answers_cut": answers_cut,
        "batch_size": batch if prompts else spec.train.batch_size, "padding": 1 - padded,
        "packing_gain": None if prompts or spec.objective.pairs else packed / padded, "prompts": prompts,
        "samples": samples, "images": None if images is None else {
            "tokens": fmean(each.images.tokens for each in images.samples),
            "tiles": fmean(each.images.tiles for each in images.samples),
            "left_out": fmean(each.images.tokens >= longest for each in images.samples),
        },
    }  # fmt: skip


def _real_share(spec: Experiment, kept: Sequence[int], images: KnownSamples | None) -> float:
    """Return `real tokens / positions` in the training batches. Positions are real tokens and padding."""
    ordered = spec.dataset.is_generated or images
    trained = tuple(kept) if ordered else shuffled(kept, spec.dataset, spec.objective.sequences)
    batches = batches_of(spec, Lengths(trained, 1.0, ""))
    return per_step(spec, batches, "real") / per_step(spec, batches, "positions")


def _rendered(example: Example) -> str:
    """Return an example as text. Each chat message starts with its role, for example `user: `."""
    if example.text is not None:
        return example.text
    if example.rejected:
        sides = (Example(example.messages), Example(example.rejected[-1:]))
        return "\n-- rejected:\n".join(map(_rendered, sides))
    return "\n".join(f"{message['role']}: {with_markers(message['content'])}" for message in example.messages)


def as_text(document: Mapping[str, Any]) -> str:
    """Return the document of `preview` as text for the terminal."""
    tokens, gain, prompts, images = (document[key] for key in ("tokens", "packing_gain", "prompts", "images"))
    what, size = "prompt" if prompts else "sample" if gain else "sequence", document["batch_size"]
    longest, beyond = units.count(document["max_length"]), units.percent(document["truncated_samples"])
    lines = [
        f"{document['dataset']}: {units.some(document['rows'], 'row')}, {document['format']}",
        f"tokens per {what}: mean {tokens['mean']:,.0f}, half up to {tokens['p50']:,.0f}, "
        f"90 % up to {tokens['p90']:,.0f}, longest {units.count(tokens['max'])} ({document['source']})",
    ]
    if images:
        left = f": {units.percent(images['left_out'])} of the samples are removed" if images["left_out"] else ""
        count = f"{images['tokens']:,.0f} tokens of images in {images['tiles']:,.3g} tiles a sample"
        lines.append(f"{count}, on average; images are not truncated{left}")
    padding = f"padding: {units.percent(document['padding'])} of the positions"
    if prompts:
        lines.append(f"longer than max_length {longest}: {beyond} of the prompts, which are removed")
        lines.append(f"{padding} of a step's {units.some(size, 'prompt')}")
    else:
        mean = f"; the mean becomes {document['mean_kept']:.0f}" if document["truncated_samples"] else ""
        cut, skipped = (units.percent(document[key]) for key in ("truncated_tokens", "answers_cut"))
        lines.append(f"truncated at max_length {longest}: {beyond} of the samples, {cut} of the tokens{mean}")
        if document["answers_cut"]:
            lines.append(f"a training skips about {skipped} of the samples, because their answer is beyond max_length")
        packing = f"; optimizations.packing computes {gain:.2f} times fewer positions" if gain and gain > 1 else ""
        lines.append(f"{padding} at batch {size}{packing}")
    lines = [*map(folded, lines), *(["", "samples, without the model's chat template:"] if document["samples"] else [])]
    for sample in document["samples"]:
        text = sample["text"]
        more = f" … ({units.some(len(text) - _LETTERS, 'character')} more)" if len(text) > _LETTERS else ""
        lines += [f"--- row {sample['row']}", *map(folded, (text[:_LETTERS] + more).split("\n"))]
    return "\n".join(lines)
