"""Change the methods of one module: replace its class by a subclass with a mixin."""

from functools import lru_cache
from typing import Any


def add(mixin: Any, module: Any, last: bool = False) -> None:
    """Make `module` use the methods of `mixin` before those of its class, or with `last` after them."""
    module.__class__ = _subclass(mixin, type(module), last)  # type: ignore[arg-type]


@lru_cache
def _subclass(mixin: Any, kind: Any, last: bool) -> Any:
    """Return a subclass of `kind` and `mixin`. It is cached, because torch.compile compiles once per class."""
    return type(kind.__name__, (kind, mixin) if last else (mixin, kind), {"__module__": kind.__module__})
