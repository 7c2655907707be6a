"""Which module of the model is at work, so that a tensor can be told by who made it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.modules import module as hooks

from ftbench.worker.model.parts import base_model
from ftbench.worker.simulate.tracker import Tracker


@contextmanager
def follow_modules(model: Any, tracker: Tracker) -> Iterator[str]:
    """Keep in `tracker.module` the name of the innermost module whose forward pass runs; yield the name of the module
    that makes the hidden states."""
    names = {id(module): name for name, module in model.named_modules()}
    base = base_model(model)
    before: list[str] = []

    def enter(module: Any, args: Any) -> None:
        before.append(tracker.module)
        tracker.module = names.get(id(module), tracker.module)

    def leave(module: Any, args: Any, output: Any) -> None:
        tracker.module = before.pop()

    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield names[id(base.base_model)]
    finally:
        for handle in handles:
            handle.remove()
