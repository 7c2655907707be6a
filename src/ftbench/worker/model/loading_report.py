"""What the loader says of a checkpoint: which weights it lacks, and which the model has no place for."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from transformers import PreTrainedModel

from ftbench.errors import MissingError
from ftbench.spec.experiment import Model

_NAMED = 3


@contextmanager
def require_complete(model: Model) -> Iterator[list[str]]:
    """Read the report of every from_pretrained within the block, whoever calls it (unsloth does so itself); yield the
    list that warnings come into. Raises MissingError for weights that the checkpoint lacks or holds in another shape:
    the library makes new ones at random, and they would be trained under the name of the published."""
    warnings: list[str] = []
    load = getattr(PreTrainedModel.from_pretrained, "__func__", None)
    if load is None:  # a library has put something of another form in its place
        yield warnings
        return

    def from_pretrained(cls: Any, /, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        loaded, report = load(cls, *args, output_loading_info=True, **({"ignore_mismatched_sizes": True} | kwargs))
        _require(model, loaded, report)
        if unexpected := report["unexpected_keys"]:
            warnings.append(f"the checkpoint holds weights that {type(loaded).__name__} leaves out: {_few(unexpected)}")
        return (loaded, report) if output_loading_info else loaded

    with mock.patch.object(PreTrainedModel, "from_pretrained", classmethod(from_pretrained)):
        yield warnings


def _require(model: Model, loaded: Any, report: dict[str, Any]) -> None:
    own = {name for named in (loaded.named_parameters, loaded.named_buffers) for name, _ in named()}
    name = model.path or model.id
    if missing := own & set(report["missing_keys"]):  # a layer that was replaced has other weights now
        raise MissingError(
            f"model {name}: the checkpoint lacks weights of {type(loaded).__name__}, which would be random: "
            f"{_few(missing)}. Complete its files, or set model.weights=random to measure the same shape without them"
        )
    if mismatched := report["mismatched_keys"]:
        shapes = {f"{key} ({list(held)}, not {list(wanted)})" for key, held, wanted in mismatched}
        raise MissingError(
            f"model {name}: the checkpoint holds weights in other shapes than its config.json says: {_few(shapes)}. "
            "Take both from one model, or set model.weights=random to measure the shape of config.json"
        )


def _few(names: Collection[str]) -> str:
    """Return the first names, and how many more there are."""
    first = ", ".join(sorted(names)[:_NAMED])
    return f"{first} and {len(names) - _NAMED} more" if len(names) > _NAMED else first
