"""What an exception inside transformers says about the files that describe a user's model."""

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftbench import families
from ftbench.core import oom
from ftbench.errors import FtbenchError, SpecError
from ftbench.spec.experiment import Model
from ftbench.spec.reading import read_config

_OF_LIBRARY = re.compile(r"/(transformers|huggingface_hub)/")
_BELOW = re.compile(r"/torch/|<")  # what a library calls, and what was made while it ran
_OF_DEVICE = re.compile(r"CUDA|NCCL|cuBLAS|cuDNN", re.IGNORECASE)


def blame(model: Model, error: BaseException) -> BaseException:
    """Return a SpecError that names the model's file, and the key where it can be found, for what was raised inside
    transformers while it built or ran the model of a user; the error itself for anything else: a model that ftbench
    brings, want of memory, a device that failed, code of others on the way."""
    users = model.path or model.weights == "pretrained"
    if isinstance(error, FtbenchError) or not isinstance(error, Exception) or not users:
        return error
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    last = next((name for name in reversed(files) if not _BELOW.search(name)), "")
    text = " ".join(str(error).split())
    if isinstance(error, (MemoryError, OSError)) or oom.recognise(f"{type(error).__name__}: {error}"):
        return error
    wrong = _wrong(model)
    if not wrong and (not _OF_LIBRARY.search(last) or last.endswith("/trainer.py") or _OF_DEVICE.search(text)):
        return error
    keys = [f"{key}: {error.args[0]}" for key in _keys_of(model, error.args[0])] if isinstance(error, KeyError) else []
    reason = wrong or (f"{', '.join(keys)} is unknown" if keys else f"{type(error).__name__}: {text[:300]}")
    return SpecError(
        f"model {model.path or model.id}: transformers cannot make or run what its config.json describes ({reason}): "
        "correct it, take the one that was published, or install the version of transformers that knows it"
    )


def _wrong(model: Model) -> str:
    """Return what the description of a known family says against the model's config.json; empty where nothing."""
    try:
        families.describe(read_config(Path(model.path or "")))
    except families.UnknownFamilyError:
        return ""
    except ValueError as error:
        return str(error)
    except (SpecError, KeyError, TypeError):
        return ""
    return ""


def _keys_of(model: Model, value: Any) -> list[str]:
    """Return the dotted keys of the model's config.json that have this value."""
    try:
        return [key for key, held in _leaves(read_config(Path(model.path or ""))) if held == value]
    except SpecError:
        return []


def _leaves(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
