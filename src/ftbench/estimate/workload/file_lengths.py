"""The lengths of a file's samples: by the model's own tokenizer where it is on this machine, else by bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ftbench.core.data_files import read_file
from ftbench.errors import FtbenchError
from ftbench.spec.datasets import Dataset
from ftbench.spec.experiment import Model

MOST_SAMPLES = 4096  # are made into tokens; of more every n-th is
# UTF-8 bytes for each token. Published tokenizers: Qwen's documentation has 3 to 4 English characters or 1.5 to 1.8
# Chinese ones. That of a model with random weights is made of the shipped sample: 6.7 there and 2.6 on other text.
_BYTES, _BYTES_RANDOM, _BYTES_SAMPLE = 4.0, 2.6, 6.7
_TURN = 5  # tokens that a chat template adds to a turn: role, beginning and end
_COLUMNS = ("instruction", "input", "output", "prompt", "completion", "messages", "conversations", "text")


@lru_cache(maxsize=8)
def file_lengths(dataset: Dataset, model: Model) -> tuple[tuple[int, ...], int, str] | str:
    """Return the lengths of at most MOST_SAMPLES rows of a file before they are cut, how many rows it has, and in words
    how they were counted; only a reason where the file cannot be read here."""
    path = Path(dataset.path) if dataset.path else Path(str(files("ftbench.facts") / "sample.jsonl"))
    try:
        rows = read_file(path)
    except (FtbenchError, ImportError) as error:
        return str(error)
    texts = [list(_texts(rows[at])) for at in range(0, len(rows), -(-len(rows) // MOST_SAMPLES))]
    tokenizer = _local_tokenizer(model)
    if tokenizer is not None:
        counts: Sequence[float] = [
            sum(len(encoded.ids) for encoded in tokenizer.encode_batch(turns, add_special_tokens=False))
            for turns in texts
        ]
        how = f"counted in {path.name} by the model's tokenizer"
    else:
        ratio = _BYTES if model.weights != "random" else _BYTES_RANDOM if dataset.path else _BYTES_SAMPLE
        counts = [sum(len(turn.encode()) for turn in turns) / ratio for turns in texts]
        how = f"{path.name} at {ratio:g} bytes a token, as the model's tokenizer is not on this machine"
    lengths = (round(count) + _TURN * len(turns) for count, turns in zip(counts, texts, strict=True))
    return tuple(max(2, length) for length in lengths), len(rows), how


def _texts(row: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of a row's columns that are trained on, in any of the formats."""
    for name in _COLUMNS:
        value = row.get(name)
        for turn in value if isinstance(value, list) else [value]:
            text = turn.get("content", turn.get("value")) if isinstance(turn, dict) else turn
            if isinstance(text, str) and text:
                yield text


def _local_tokenizer(model: Model) -> Any | None:
    """Return the tokenizer in the model's directory or in the hub's cache; None where there is none, or where the
    tokenizers package is not installed."""
    if model.weights == "random":
        return None
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub")
    snapshots = cache.expanduser() / f"models--{model.id.replace('/', '--')}" / "snapshots"
    result = Path(model.path).glob("tokenizer.json") if model.path else snapshots.glob("*/tokenizer.json")
    path = next(iter(sorted(result)), None)
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001 - the library raises a plain Exception for a file that it cannot read
        return None
