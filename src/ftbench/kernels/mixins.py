"""Change the methods of one module: replace its class by a subclass with a mixin."""

from functools import lru_cache
from typing import Any


def add(mixin: Any, module: Any, last: bool = False) -> None:
    """Make `module` use the methods of `mixin` before those of its class, or with `last` after them."""
    kinds = (type(module), mixin) if last else (mixin, type(module))
    module.__class__ = _subclass(kinds, type(module))  # type: ignore[arg-type]


@lru_cache
def _subclass(kinds: tuple[Any, Any], kind: Any) -> Any:
    """Return a class with the methods of `kinds`. It is cached, because torch.compile compiles once per class."""
    return type(kind.__name__, kinds, {"__module__": kind.__module__})
