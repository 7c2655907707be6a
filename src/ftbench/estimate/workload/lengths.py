"""Find the sample lengths of a spec in tokens.

Lengths of synthetic data are exact. Other lengths come from runs on the same data, from a local file (with the model's
tokenizer if available), or from the known mean length of the data set."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ftbench.errors import FtbenchError
from ftbench.facts import SAMPLE
from ftbench.launch import checks
from ftbench.spec.batches import SHORTEST, synthetic_lengths
from ftbench.spec.datasets import Dataset
from ftbench.spec.experiment import Model
from ftbench.store.machine import cache_dir

if TYPE_CHECKING:
    from ftbench.core.data_formats import Example

MOST_SAMPLES = 4096  # an estimate uses at most this many samples; more would change a batch's mean by about 1 %
DRAWN = 20_000  # at most this many lengths are drawn; for more samples, the longest is computed from the distribution
# UTF-8 bytes per token. Qwen's documentation: a token has 3 to 4 English or 1.5 to 1.8 Chinese characters. For random
# weights, ftbench trains a tokenizer on the shipped sample: 6.7 bytes per token on this sample, 2.6 on other text.
_BYTES, _BYTES_RANDOM, _BYTES_SAMPLE = 4.0, 2.6, 6.6
_BYTES_TINY = 3.0  # UTF-8 bytes per token with the tiny models' vocabulary of 2,048, measured on the sample data
_TURN = 5  # tokens that a chat template adds per turn: role, start and end
_TURN_RANDOM = 6.5  # tokens per turn with the chat template of random-weight models (worker/model/tokenizer.py)
_TEMPLATE = 100  # tokens before the first turn: the system prompts of gpt-oss and Qwen2.5


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Sample lengths in tokens, the share of label tokens in all tokens (`labels`), and the source of the lengths.

    With `upper_bound`, the samples may be shorter. `rows` is the number of samples if the data set was read. `patches`
    and `tiles` are means per sample. Objects are compared by identity, because they are keys of the batch cache."""

    values: tuple[int, ...]
    labels: float
    source: str
    upper_bound: bool = False
    rows: int | None = None
    patches: float = 0.0
    tiles: float = 0.0

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


@dataclass(frozen=True, slots=True, eq=False)
class FileLengths:
    """Lengths in tokens of at most MOST_SAMPLES rows of a file, before truncation.

    `source` describes how tokens were counted. The file has `rows` rows. No row has more than `most` tokens, because a
    token has at least one byte. Objects are compared by identity, because they are keys of a cache."""

    values: tuple[int, ...]
    rows: int
    most: int
    source: str


def lengths_of(
    dataset: Dataset, recorded: Iterable[tuple[Dataset, dict[str, Any]]] = (), model: Model | None = None,
    pairs: bool = False, prompts: bool = False,
) -> Lengths:  # fmt: skip
    """Return the sample lengths of a data set.

    Args:
        dataset: The data set.
        recorded: Data sets of earlier runs with the same objective, with the `dataset` section of their summary.json.
        model: The model. Its tokenizer counts the tokens of a local file.
        pairs: Whether samples are preference pairs. Both sequences of a pair count as samples.
        prompts: Whether to count only prompts. For data sets of the Hub, answers are included."""
    sequences = 2 if pairs else 1
    if dataset.name == "synthetic":
        count = min(dataset.samples or MOST_SAMPLES, MOST_SAMPLES) * sequences
        return Lengths(_drawn(dataset, count), 1.0 / sequences, "exact: synthetic lengths")
    identity = attrgetter("name", "path", "revision")
    same = [described for other, described in recorded if identity(other) == identity(dataset)]
    file = file_lengths(dataset, model, pairs, prompts) if dataset.name in ("file", "sample") and model else ""
    rows = None if isinstance(file, str) else file.rows
    if same and (known := _from_histogram(same[-1], dataset)) is not None:
        return replace(known, rows=rows)
    if dataset.source.mean_tokens is not None:
        like = Dataset(name="synthetic", like=dataset.name, samples=MOST_SAMPLES, max_length=dataset.max_length)
        drawn = _drawn(like, min(dataset.samples or MOST_SAMPLES, MOST_SAMPLES))
        answers = ", answers included" if prompts else ""
        return Lengths(drawn, 1.0, f"random, with the mean of {dataset.name}{answers}", upper_bound=prompts)
    why = f"the lengths of {dataset.name} are not known"
    if not isinstance(file, str):
        return Lengths(shuffled(file.values, dataset, sequences), 1.0, file.source, rows=rows)
    why += f" ({file})" * bool(file) + f": every sample counts as max_length {dataset.max_length:,}"
    return Lengths((dataset.max_length,) * 64, 1.0, why, upper_bound=True)


def shuffled(values: Sequence[int], dataset: Dataset, sequences: int = 1) -> tuple[int, ...]:
    """Return the truncated lengths of a file's rows in training order. A preference pair has two lengths."""
    every = np.minimum(values, dataset.max_length).reshape(-1, sequences)
    order = np.random.default_rng(dataset.seed).permutation(len(every))  # as in worker/data/prepare.py
    return tuple(every[order[: dataset.samples]].ravel().tolist())


@lru_cache(maxsize=64)
def _drawn(dataset: Dataset, count: int) -> tuple[int, ...]:
    return tuple(synthetic_lengths(dataset, min(count, 1024) if dataset.length is not None else count))


@lru_cache(maxsize=64)
def sample_lengths(dataset: Dataset, sequences: int = 1) -> tuple[npt.NDArray[np.int64] | None, str]:
    """Return the lengths of all samples (None if unknown), and a text about their source. A pair has two lengths."""
    if dataset.name != "synthetic":
        return None, f"at most max_length {dataset.max_length:,} per sample"
    count = ((dataset.samples or 0) + dataset.eval_samples) * sequences
    if dataset.length is not None:
        return np.full(min(count, DRAWN), dataset.length), f"every sample has {dataset.length:,} tokens"
    if count > DRAWN:
        return None, f"lengths drawn, at most max_length {dataset.max_length:,}"
    lengths = np.asarray(_drawn(dataset, count))
    return lengths[: (dataset.samples or 0) * sequences], f"synthetic lengths, the longest {lengths.max():,}"


def expected_longest(mean: float, sigma: float, count: int, longest: int, chance: float = 0.5) -> int:
    """Return an estimate of the longest of `count` sample lengths. `chance` selects a quantile (0.5: the median).

    Sample lengths are log-normal with this `mean`, and at most `longest`. `sigma` is the standard deviation of their
    logarithm."""
    # Compute 1 - probability, because 0.5 ** (1 / count) rounds to 1 if count is 10^16 or more.
    quantile = -NormalDist().inv_cdf(-math.expm1(math.log(chance) / max(count, 1)))
    return max(SHORTEST, min(longest, round(math.exp(math.log(mean) - sigma * sigma / 2 + sigma * quantile))))


def _from_histogram(described: dict[str, Any], dataset: Dataset) -> Lengths | None:
    """Return random sample lengths that follow the length histogram of a run. Return None without a histogram."""
    lengths = described.get("tokens_before_truncation") or {}
    histogram, mean = lengths.get("histogram") or {}, lengths.get("mean")
    counts, edges = histogram.get("counts"), histogram.get("edges")
    total = (described.get("tokens") or {}).get("total")
    if not counts or not edges or not mean or not total:
        return None
    dice = random.Random(dataset.seed)
    size = min(sum(counts), MOST_SAMPLES)
    values = dice.choices(range(len(counts)), counts, k=size)
    spread = [edges[i] + dice.random() * (edges[i + 1] - edges[i]) for i in values]
    scale = mean * size / sum(spread)  # bins are wide for short samples, so scale to the measured mean
    cut = tuple(max(2, min(dataset.max_length, round(length * scale))) for length in spread)
    labels = min(1.0, (described.get("label_tokens") or total) / total) if dataset.loss_on != "all" else 1.0
    return Lengths(cut, labels, f"recorded by a run on {dataset.name}")


@lru_cache(maxsize=8)
def file_lengths(dataset: Dataset, model: Model, pairs: bool = False, prompts: bool = False) -> FileLengths | str:
    """Return the lengths of a file's rows in tokens. If the file is missing on this machine, return the reason as text.

    With `pairs`, count both sequences of a row. With `prompts`, count only the questions. Raise FtbenchError if the
    file cannot be read."""
    from ftbench.core.data_files import read_file  # imported late: most estimates read no file
    from ftbench.spec.datasets import check_images, row_example, row_format  # rarely needed

    path = Path(dataset.path or SAMPLE)
    try:
        rows = read_file(path)
        form = row_format(dataset, rows[0], rows.where(0), pairs)
        counted = range(0, len(rows), -(-len(rows) // MOST_SAMPLES))
        examples = [row_example(dataset, rows[at], form, rows.where(at)) for at in counted]
        check_images(dataset, model, examples)
        most_bytes = max(_bytes_held(rows[at]) for at in range(len(rows)))
    except FtbenchError as error:
        if path.exists():
            raise
        return str(error)
    texts = [list(map(_text, sequence)) for example in examples for sequence in _sequences(example, prompts)]
    tokenizer = _local_tokenizer(model)
    if tokenizer is not None:
        counts: Sequence[float] = [
            sum(len(encoded.ids) for encoded in tokenizer.encode_batch(turns, add_special_tokens=False))
            for turns in texts
        ]
        how = f"counted in {path.name} by the model's tokenizer"
    else:
        of_sample = _BYTES_TINY if model.id.startswith("tiny/") else _BYTES_SAMPLE
        ratio = _BYTES if model.weights != "random" else _BYTES_RANDOM if dataset.path else of_sample
        counts = [sum(len(turn.encode()) for turn in turns) / ratio for turns in texts]
        how = f"{path.name} at {ratio:g} bytes per token, because the model's tokenizer is not on this machine"
    turn = _TURN_RANDOM if model.weights == "random" else _TURN
    lengths = (round(count + turn * len(turns)) for count, turns in zip(counts, texts, strict=True))
    values = tuple(max(2, length) for length in lengths)
    whole = tokenizer is not None and len(rows) <= MOST_SAMPLES
    return FileLengths(values, len(rows), _TEMPLATE + (max(values) if whole else most_bytes), how)


def _bytes_held(value: Any) -> int:
    """Return an upper bound of a row's tokens: one per byte of text, and _TURN per value, for the chat template."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return _TURN + (len(value.encode(errors="surrogatepass")) if isinstance(value, str) else 0)
    return sum(map(_bytes_held, value))


def _sequences(row: Example, prompts: bool) -> Iterator[tuple[dict[str, Any], ...]]:
    """Yield the messages of each sequence of a row: two sequences for a pair, only the question with `prompts`."""
    if row.text is not None:
        yield ({"content": row.text},)
    elif prompts:
        yield row.question
    else:
        yield from (messages for messages in (row.messages, row.rejected) if messages)


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def tokenizer_file(model: Model) -> Path | None:
    """Return the path of tokenizer.json in the model's folder, the Hub's cache or ftbench's cache, or None."""
    if model.weights == "random":
        kept = (cache_dir() / "models").glob(f"{model.id.replace('/', '-')}-*/tokenizer.json")
        return next(kept, None) if not model.path else None
    snapshots = checks.cache(os.environ) / f"models--{model.id.replace('/', '--')}" / "snapshots"
    result = Path(model.path).glob("tokenizer.json") if model.path else snapshots.glob("*/tokenizer.json")
    return next((path for path in sorted(result) if path.is_file()), None)


def _local_tokenizer(model: Model) -> Any | None:
    """Return the model's tokenizer. Return None if tokenizer.json or the tokenizers package is missing."""
    path = tokenizer_file(model)
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001 - the library raises a plain Exception for a file that it cannot read
        return None
