"""Switches that change speed or memory and not what is learned: a module each, found by its name in this package."""

import importlib
import pkgutil
import typing
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model

from ftbench.spec.base import Part
from ftbench.spec.optimizations.declaration import OFF, Optimization

OPTIMIZATIONS: dict[str, Optimization] = {
    name: importlib.import_module(f"{__name__}.{name}").OPTIMIZATION
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__))
    if name != "declaration"
}

ORDER = tuple(TopologicalSorter({name: kept.after for name, kept in OPTIMIZATIONS.items()}).static_order())
"""The order in which they are applied: each after those that it names, the alphabet's where none names another."""

if TYPE_CHECKING:

    class Optimizations(Part):
        """The section `optimizations:`, a field for each."""

        def __getattr__(self, name: str) -> Any: ...

else:
    Optimizations = create_model(
        "Optimizations",
        __base__=Part,
        __module__=__name__,
        __doc__="Each is independent, and each is verified on the live objects before a number is believed.",
        **{
            name: (kept.type, Field(kept.default, description=kept.description)) for name, kept in OPTIMIZATIONS.items()
        },
    )


def choices(name: str) -> list[Any]:
    """Return what an optimization can be set to, but for off, auto and a number."""
    return [value for value in _values(OPTIMIZATIONS[name].type) if value not in OFF]


def _values(annotation: Any) -> list[Any]:
    """Return what the type of an option admits, but for false: a switch, words, or both."""
    if annotation is bool:
        return [True]
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    return [value for part in typing.get_args(annotation) for value in _values(part)]


def switched_on(section: Optimizations) -> dict[str, Any]:
    """Return name and value of what a spec switches on."""
    return {name: value for name in OPTIMIZATIONS if (value := getattr(section, name)) not in OFF}
