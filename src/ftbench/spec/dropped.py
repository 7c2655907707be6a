"""What of a sweep would be dropped without a word: a key that two axes say, a `--set` that an axis says again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftbench.errors import SpecError
from ftbench.spec.load import SpecLayer

if TYPE_CHECKING:
    from ftbench.spec.sweep import Axis


def check_apart(axes: Iterable[Axis]) -> None:
    """Raise SpecError for two axes that say the same key: the values of the first would be dropped."""
    says = dict[str, str]()
    for axis in axes:
        for key in {key for layer in axis.layers for key in _leaves(layer.data)}:
            if key in says:
                raise SpecError(
                    f"{axis.layers[0].origin}: {says[key]} and {axis.key} both say {key}, and one would be dropped: "
                    "leave it to one of them"
                )
            says[key] = axis.key


def say(layers: Sequence[SpecLayer], axes: Iterable[Axis], on_note: Callable[[str], None]) -> None:
    """Say which `--set` does nothing, since an axis says its keys in every cell."""
    said = {key: axis.key for axis in axes for key in set.intersection(*({*_leaves(x.data)} for x in axis.layers))}
    for layer in (layer for layer in layers if layer.origin.startswith("--set")):
        keys = [*_leaves(layer.data)]
        if keys and all(key in said for key in keys):
            on_note(f"{layer.origin}: does nothing, since the axis {said[keys[0]]} says it in every cell")


def _leaves(data: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in data.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"
