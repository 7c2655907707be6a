"""Build a spec without a spec file, from the model and the options on the command line."""

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftbench.errors import SpecError
from ftbench.facts import architecture
from ftbench.spec.datasets import FILES

_SPECS = (".yaml", ".yml", ".json")
_SAMPLES = 1000  # number of synthetic samples if the user does not pass `--samples`
_MAX_LENGTH = 2048  # the default of dataset.max_length
LONGEST = 2**19


def names_model(path: Path) -> bool:
    """Return whether a command's argument is a model (`owner/name`, or a folder with config.json), not a spec file."""
    if path.suffix in _SPECS or os.path.isfile(path):
        return False
    if architecture(str(path)) or os.path.isfile(path / "config.json"):
        return True
    return re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) is not None and not path.parent.exists()


def model_keys(path: Path) -> dict[str, Any]:
    """Return the keys of a spec that select this model."""
    if os.path.isdir(path) and not architecture(str(path)):
        return {"model": {"path": os.path.abspath(path)}}
    return {"model": {"id": str(path)}}


def spec_text(path: Path) -> bytes:
    """Return the bytes of a spec file. If `path` names a model, return a spec in JSON that selects this model."""
    return json.dumps(model_keys(path)).encode() if names_model(path) else path.read_bytes()


def spec_sets(
    sets: Sequence[str] | None, recipe: str | None, dataset: str | None, length: int | None, samples: int | None = None
) -> list[str]:
    """Express `--recipe`, `--dataset` and `--length` as `--set` values. Return them, followed by the user's `sets`.

    Raises:
        SpecError: If a file is missing, the length is out of range, or `--length` and `--dataset` are both given."""
    if dataset is not None and length is not None:
        raise SpecError("--length: gives the mean length of generated samples: remove it, or remove --dataset")
    first = [] if recipe is None else [f"recipe={recipe}"]
    if dataset is not None:
        first.append(f"dataset={_data(dataset)}")
    if length is not None:
        first.append(f"dataset={json.dumps(_generated(length, samples))}")
    return [*first, *(sets or [])]


def _data(dataset: str) -> str:
    path = Path(os.path.expanduser(dataset))
    if path.exists():
        return json.dumps({"name": "file", "path": os.path.abspath(path)})
    if path.suffix in FILES:
        raise SpecError(f"--dataset {dataset}: no such file; name a file, or a data set of `ftbench list datasets`")
    return dataset


def _generated(length: int, samples: int | None) -> dict[str, Any]:
    if not 2 <= length <= LONGEST:
        raise SpecError(
            f"--length {length}: must be from 2 to {LONGEST:,}, the mean number of tokens of a sample; "
            "`ftbench data MODEL --dataset FILE` counts them"
        )
    count = samples if samples is not None and samples >= 1 else _SAMPLES
    return {"name": "synthetic", "samples": count, "mean_length": length, "max_length": usual_max_length(length)}


def usual_max_length(mean: int) -> int:
    """Return the `max_length` in tokens that the option `--length` sets for samples with this mean length."""
    return max(_MAX_LENGTH, 1 << (2 * mean - 1).bit_length())


def options_of(sets: Sequence[str]) -> list[str]:
    """Return command-line options with the same effect as these `--set` values. Where possible, use `--recipe`,
    `--dataset` or `--length` instead of `--set`. `--recipe` replaces only the first, because later ones override it."""
    words: list[str] = []
    for text in sets:
        key, _, value = text.partition("=")
        data: Any = None
        with suppress(ValueError):
            data = json.loads(value) if key == "dataset" else None
        if not isinstance(data, dict):
            has_option = value[:1] != "{" and (key == "dataset" or (key == "recipe" and text == sets[0]))
            words += [f"--{key}", value] if has_option else [f"--set={text}"]
        elif data.keys() == {"name", "path"}:
            words += ["--dataset", data["path"]]
        elif data == _generated(data.get("mean_length", _SAMPLES), data.get("samples")):
            words += ["--length", str(data["mean_length"]), f"--set=dataset.samples={data['samples']}"]
        else:
            words.append(f"--set={text}")
    return words
