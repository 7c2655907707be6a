"""Optimizations: switches that change speed or memory but not the training objective."""

import typing
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model

from ftbench.spec.base import OFF, Optimization, Part
from ftbench.spec.optimizations import compute, memory

OPTIMIZATIONS: dict[str, Optimization] = dict(sorted((compute.OPTIMIZATIONS | memory.OPTIMIZATIONS).items()))

# The order in which optimizations are applied. Each comes after the optimizations in its `after`.
ORDER = tuple(TopologicalSorter({name: each.after for name, each in OPTIMIZATIONS.items()}).static_order())


class _Section(Part):
    removed = ("feature_cache", "fp8_head", "tile_buckets")


if TYPE_CHECKING:

    class Optimizations(Part):
        """The section `optimizations:` with one field per optimization."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Optimizations = create_model(
        "Optimizations",
        __base__=_Section,
        __module__=__name__,
        __doc__="Each one is independent, and each is verified on the live objects.",
        **{
            name: (each.type, Field(each.default, description=each.description)) for name, each in OPTIMIZATIONS.items()
        },
    )


def choices(name: str) -> list[Any]:
    """Return the values of an optimization, such as True or `offload`. Off, auto and numbers are not included."""
    return [value for value in _values(OPTIMIZATIONS[name].type) if value not in OFF]


def _values(annotation: Any) -> list[Any]:
    if annotation is bool:
        return [True]
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    return [value for part in typing.get_args(annotation) for value in _values(part)]


def switched_on(section: Optimizations) -> dict[str, Any]:
    """Return {name: value} of the optimizations that are on."""
    return {name: value for name in OPTIMIZATIONS if (value := getattr(section, name)) not in OFF}
