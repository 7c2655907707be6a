"""Explain problems with the files of a user's model: incomplete checkpoints and unusable configurations."""

import re
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from transformers import PreTrainedModel

from ftbench.core import oom
from ftbench.errors import FtbenchError, MissingError, SpecError
from ftbench.spec.experiment import Model

_SHOWN = 3
_LIBRARY = re.compile(r"/(transformers|huggingface_hub)/")
_BELOW = re.compile(r"/torch/|<")  # frames of torch and of generated code
_DEVICE = re.compile(r"CUDA|NCCL|cuBLAS|cuDNN", re.IGNORECASE)


@contextmanager
def require_complete(model: Model) -> Iterator[list[str]]:
    """Check the loading report of every `from_pretrained` call in the block, and yield the list of warnings.

    Raises:
        MissingError: The checkpoint lacks weights or has them in another shape. transformers would replace them with
            random ones, and the run would be reported as training the published model.
    """
    warnings: list[str] = []
    load = getattr(PreTrainedModel.from_pretrained, "__func__", None)
    if load is None:  # a library replaced it with something that is not a class method
        yield warnings
        return

    def from_pretrained(cls: Any, /, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        loaded, report = load(cls, *args, output_loading_info=True, **({"ignore_mismatched_sizes": True} | kwargs))
        _require(model, loaded, report)
        if unexpected := report["unexpected_keys"]:
            warnings.append(f"{type(loaded).__name__} ignores these weights of the checkpoint: {_first(unexpected)}")
        return (loaded, report) if output_loading_info else loaded

    with mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(from_pretrained)):
        yield warnings


def _require(model: Model, loaded: Any, report: dict[str, Any]) -> None:
    own = {name for named in (loaded.named_parameters, loaded.named_buffers) for name, _ in named()}
    name = model.path or model.id
    if missing := own & set(report["missing_keys"]):  # a replaced layer has other weights
        raise MissingError(
            f"model {name}: the checkpoint lacks weights of {type(loaded).__name__}, which would be random: "
            f"{_first(missing)}. Complete its files, or set model.weights=random to measure the same shape without them"
        )
    if mismatched := report["mismatched_keys"]:
        shapes = {f"{key} ({list(actual)}, not {list(wanted)})" for key, actual, wanted in mismatched}
        raise MissingError(
            f"model {name}: weights of the checkpoint have other shapes than config.json: {_first(shapes)}. "
            "Take both from one model, or set model.weights=random to measure the shape of config.json"
        )


def _first(names: Collection[str]) -> str:
    """Return the first names and the number of the others."""
    first = ", ".join(sorted(names)[:_SHOWN])
    return f"{first} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else first


def explain(model: Model, error: BaseException) -> BaseException:
    """Return a SpecError about the user's config.json if transformers raised `error` for it, otherwise `error` itself.

    Errors of shipped models, of devices and of missing memory are never attributed to the file.
    """
    users = model.path or model.weights == "pretrained"
    if not users or not isinstance(error, Exception) or isinstance(error, (FtbenchError, MemoryError, OSError)):
        return error
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    last = next((name for name in reversed(files) if not _BELOW.search(name)), "")
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if oom.recognise(text) or not _LIBRARY.search(last) or last.endswith("/trainer.py") or _DEVICE.search(text):
        return error
    return SpecError(
        f"model {model.path or model.id}: transformers cannot build or run the model of its config.json ({text[:300]})."
        " Correct the file, use the published one, or install a version of transformers that supports it"
    )
