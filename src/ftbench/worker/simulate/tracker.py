"""Every storage that a run makes on the simulated GPU: how large, when born, when freed, and who made it."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.modules import module as hooks

from ftbench.worker.model.parts import base_model

ACCUMULATE = "accumulate"  # the sum of two gradients, made by the engine of the backward pass


@dataclass(slots=True)
class Storage:
    """One allocation. `born` and `freed` are numbers of events; `freed` is None while it lives. `kind` is what the
    tensor turned out to be: weights, adapters, gradients, optimizer; None where it is told from phase and module."""

    bytes: int
    born: int
    phase: str
    module: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    freed: int | None = None
    freed_in: str | None = None
    kind: str | None = None
    in_place: bool = False  # a sum that a GPU would have made in the place of its first term


class Tracker:
    """The log of allocations, in the order in which the program makes them."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.module = ""
        self.events = 0
        self.steps: list[int] = []  # the event that each step of the optimizer begins with
        self.phases: list[tuple[int, str]] = [(0, "load")]  # and each phase
        self._alive: dict[int, tuple[Storage, Any]] = {}

    @property
    def phase(self) -> str:
        return self.phases[-1][1]

    def enter(self, phase: str) -> None:
        """Make the next event the first of that phase."""
        if phase != self.phase:
            self.phases.append((self.events, phase))

    def begin_step(self) -> None:
        self.steps.append(self.events)
        self.enter("forward")

    def saw(self, tensor: Any, operation: str) -> None:
        """Note a tensor that an operation gave back: new, or a view of what is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        record = self._record(storage.nbytes(), operation, tuple(tensor.shape), dtype)
        tensor.is_whole = True
        self._alive[key] = (record, weakref.ref(storage, partial(self._free, key)))

    def sums(self, first: Any, result: torch.Tensor) -> None:
        """Note the engine's sum of two gradients. Its first term is written to unless it is a view, as the gradient of
        a weight is, transposed: then the first sum is made beside it, and those after it in that one's place."""
        in_place = getattr(first, "is_whole", False)
        self.saw(result, ACCUMULATE)
        self._alive[result.untyped_storage()._cdata][0].in_place = in_place

    def persistent(self, size: int, operation: str) -> None:
        """Note memory that the libraries under torch take from its allocator and keep."""
        self._record(size, operation, (size,), "uint8").kind = "workspace"

    def is_a(self, tensor: torch.Tensor | None, kind: str) -> None:
        """Say what a live tensor is."""
        if tensor is not None and (result := self._alive.get(tensor.untyped_storage()._cdata)):
            result[0].kind = kind

    def _record(self, size: int, operation: str, shape: tuple[int, ...], dtype: str) -> Storage:
        record = Storage(size, self.events, self.phase, self.module, operation, shape, dtype)
        self.events += 1
        self.storages.append(record)
        return record

    def _free(self, key: int, _: Any) -> None:
        record, _ = self._alive.pop(key)
        record.freed, record.freed_in = self.events, self.phase
        self.events += 1


@contextmanager
def follow_modules(model: Any, tracker: Tracker) -> Iterator[str]:
    """Keep in `tracker.module` the name of the innermost module whose forward pass runs; yield the name of the module
    that makes the hidden states."""
    names = {module: name for name, module in model.named_modules()}
    before: list[str] = []

    def enter(module: Any, args: Any) -> None:
        before.append(tracker.module)
        tracker.module = names.get(module, tracker.module)

    def leave(module: Any, args: Any, output: Any) -> None:
        tracker.module = before.pop()

    with hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave, always_call=True):
        yield names[base_model(model).base_model]


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the arguments or results of an operation, which nest lists at most."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors(value)
