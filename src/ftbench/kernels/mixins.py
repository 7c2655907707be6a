"""Change the methods of one module: replace its class by a subclass with a mixin."""

from functools import lru_cache
from typing import Any


def add(mixin: Any, module: Any) -> None:
    """Make `module` use the methods of `mixin` before those of its class."""
    module.__class__ = _subclass(mixin, type(module))  # type: ignore[arg-type]


@lru_cache
def _subclass(mixin: Any, kind: Any) -> Any:
    """Return a subclass of `kind` with the methods of `mixin`. It is cached: torch.compile compiles once per class."""
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
