"""Which memory belongs to what stays: weights, adapters, the optimizer's state; and what are gradients just now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ftbench.worker.measure.applied import innermost


def owned(loop: Any) -> dict[int, tuple[str, int]]:
    """Return the address of each storage, what it is, and its bytes."""
    adapted = hasattr(loop.model, "get_base_model")
    storages: dict[int, tuple[str, int]] = {}
    for parameter in loop.model.parameters():
        kind = "adapters" if adapted and parameter.requires_grad else "weights"
        for tensor in (parameter, *_of_quantised(parameter)):
            _add(storages, tensor, kind)
    for buffer in loop.model.buffers():
        _add(storages, buffer, "weights")
    optimizer = innermost(loop.optimizer)
    for values in (optimizer.state if optimizer is not None else {}).values():
        for value in values.values():
            _add(storages, value, "optimizer")
    return storages


def gradients(loop: Any) -> set[int]:
    """Return the addresses of the gradients that there are."""
    storages: dict[int, tuple[str, int]] = {}
    for parameter in loop.model.parameters():
        _add(storages, parameter.grad, "gradients")
    return set(storages)


def _add(storages: dict[int, tuple[str, int]], tensor: Any, kind: str) -> None:
    if torch.is_tensor(tensor) and tensor.numel():
        storage = tensor.untyped_storage()
        storages.setdefault(storage.data_ptr(), (kind, storage.nbytes()))


def _of_quantised(parameter: Any) -> Iterator[Any]:
    """Return the scales and tables that bitsandbytes keeps beside a 4-bit weight."""
    state = getattr(parameter, "quant_state", None)
    while state is not None:
        yield from (getattr(state, name, None) for name in ("absmax", "code", "offset"))
        state = getattr(state, "state2", None)
