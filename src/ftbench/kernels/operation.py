"""Custom operations for compiled graphs with little overhead on the host.

A call of torch.library.custom_op takes 25 to 30 µs longer, because its autograd wrapper and its checks are Python. The
operations here are only called inside autograd functions, which need neither.
"""

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("ftbench", "FRAGMENT")


def operation(*mutates: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as an operation `ftbench::NAME` and return the operation.

    Args:
        mutates: Arguments that the function writes into.
        fake: Returns empty tensors of the shapes and types of the results, for the compiler.
    """

    def register(function: Callable[..., Any]) -> Any:
        name, schema = function.__name__, torch.library.infer_schema(function, mutates_args=mutates)
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"ftbench::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.ftbench, name).default

    return register
