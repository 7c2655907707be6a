"""Names for the parts of a step in the trace: contiguous, on the training thread.

data → forward ⇄ loss → metrics → backward, for each micro-batch, then clip → optimizer. `metrics` is what the
trainer computes from the logits in addition to the loss.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from trl.trainer import sft_trainer

from ftbench.core.rows import BACKWARD, CLIP, DATA, FORWARD, LOSS, METRICS, PREFIX, STAGES
from ftbench.worker.optimizations import chunked_loss
from ftbench.worker.parallel.stages import Pipeline, Stage


class Ranges:
    """Marks one range at a time. Without a profiler, a range costs one or two microseconds."""

    def __init__(self) -> None:
        self._open: Any = None
        self.listeners: list[Callable[[str], None]] = []  # called when a part begins

    def enter(self, name: str) -> None:
        """End the current range and begin another."""
        self.leave()
        for listener in self.listeners:
            listener(name)
        opened = torch.profiler.record_function(PREFIX + name)
        opened.__enter__()
        self._open = lambda: opened.__exit__(None, None, None)

    def leave(self) -> None:
        if self._open is not None:
            self._open()
            self._open = None

    def around(self, function: Callable[..., Any], name: str, then: str) -> Callable[..., Any]:
        """Return the function, wrapped to run in the range `name` and to enter the range `then` afterwards."""

        @wraps(function)
        def ranged(*args: Any, **kwargs: Any) -> Any:
            self.enter(name)
            result = function(*args, **kwargs)
            self.enter(then)
            return result

        return ranged


def mark(loop: Any, ranges: Ranges) -> None:
    """Put ranges around the parts of this trainer's step. Stages of a pipeline have no range for the loss."""
    if Pipeline.of(loop.model):
        for name, part in (("forward", FORWARD), ("backward", BACKWARD), ("backward_weight", BACKWARD)):
            compute = getattr(Stage, f"{name}_one_chunk")
            setattr(Stage, f"{name}_one_chunk", ranges.around(compute, part, STAGES))
        loop.accelerator.clip_grad_norm_ = ranges.around(loop.accelerator.clip_grad_norm_, CLIP, DATA)
        return
    loop.model.register_forward_pre_hook(lambda *_: ranges.enter(FORWARD))
    loop.model.register_forward_hook(lambda *_: ranges.enter(METRICS))
    loop.accelerator.backward = ranges.around(loop.accelerator.backward, BACKWARD, DATA)
    loop.accelerator.clip_grad_norm_ = ranges.around(loop.accelerator.clip_grad_norm_, CLIP, DATA)
    base = loop.model.get_base_model() if hasattr(loop.model, "get_base_model") else loop.model
    if isinstance(getattr(type(base), "loss_function", None), property):  # transformers' own
        base.loss_function = ranges.around(base.loss_function, LOSS, FORWARD)
    for module, name in ((chunked_loss, "chunked_loss"), (sft_trainer, "_chunked_cross_entropy_loss")):
        if hasattr(module, name):  # trl's range has another name in other versions; its kernels identify it too
            setattr(module, name, ranges.around(getattr(module, name), LOSS, FORWARD))
