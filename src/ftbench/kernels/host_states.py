"""Keep optimizer states in pinned host memory. Copy the states of a parameter to the device only for its update.

The states of a parameter are copied to the device while the previous parameter is updated. The order of the parameters
is the order of the last optimizer step. The first states of a step are copied on demand, so they take no device memory
during the forward pass. Copies to the host overlap with later updates. Two updates later, the device copy is freed.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ftbench.kernels.weight_stream import Copies, Weight, view

_SMALL = 1 << 16  # bytes; smaller states stay on the device
_LEAVING = 2  # maximum number of parameters whose states are being copied to the host
_Copied = list[tuple[torch.Tensor, Any]]  # tensors on the device, each with the event that marks its copy as complete


class HostStates:
    """Keeps optimizer states on the host. `state` is optimizer.state: state[parameter]["exp_avg"] is a tensor."""

    def __init__(self, state: Any, device: torch.device) -> None:
        self._state, self._in, self._out = state, Copies(device), Copies(device)
        self._hosts: dict[Any, list[torch.Tensor]] = {}
        self._coming: dict[Any, _Copied] = {}
        self._leaving: deque[tuple[Any, _Copied]] = deque()
        self._next: dict[Any, Any] = {}
        self._last: Any = None

    @property
    def bytes(self) -> int:
        """Return the size of all states in host memory, in bytes."""
        return self._out.held

    def around(self, parameter: Any, step: Callable[[], Any]) -> None:
        """Copy a parameter's states to the device, call `step` to update it, and start to copy its states back."""
        self._begin(parameter)
        if parameter in self._coming:
            for part, (copies, ready) in zip(self._parts(parameter), self._coming.pop(parameter), strict=True):
                self._in.wait_for(ready)
                part.put(copies)
        self._next[self._last], self._last = parameter, parameter
        if (following := self._next.get(parameter)) is not parameter:
            self._begin(following)
        step()
        self._leave(parameter)

    def end_step(self) -> None:
        """Wait for the last copies to the host and free their device memory. Call this after each optimizer step."""
        while self._leaving:
            self._free()
        self._last = None

    def _begin(self, parameter: Any) -> None:
        """Start to copy a parameter's states to the device. If a copy to the host is still running, wait for it."""
        if parameter not in self._hosts or parameter in self._coming:
            return
        while any(left is parameter for left, _ in self._leaving):
            self._free()
        copies = [torch.empty_like(host, device=self._in.device) for host in self._hosts[parameter]]
        hosts = self._hosts[parameter]
        self._coming[parameter] = [(each, self._in.start(each, host)) for each, host in zip(copies, hosts, strict=True)]

    def _leave(self, parameter: Any) -> None:
        """Start to copy a parameter's states to the host. The optimizer refers to the host tensors from now on."""
        parts = list(self._parts(parameter))
        if parameter not in self._hosts:
            tensors = [part.tensor for part in parts]
            self._hosts[parameter] = [view(self._out.pinned(each.nbytes), 0, each) for each in tensors]
        copied: _Copied = []
        for part, host in zip(parts, self._hosts[parameter], strict=True):
            copied.append((part.tensor, self._out.start(host, part.tensor)))
            part.put(host)
        self._leaving.append((parameter, copied))
        if len(self._leaving) > _LEAVING:
            self._free()

    def _free(self) -> None:
        """Make the device wait for the oldest running copy to the host. Then free the device tensors of this copy."""
        _, copied = self._leaving.popleft()
        for _, ready in copied:
            self._out.wait_for(ready)

    def _parts(self, parameter: Any) -> Iterator[Weight]:
        """Yield a parameter's state tensors, except small ones. Yield the inner tensors of torchao's 8-bit states."""
        values = self._state[parameter]
        for name, value in values.items():
            if hasattr(value, "tensor_attrs"):
                parts = [Weight(getattr(value, attr), partial(setattr, value, attr)) for attr in value.tensor_attrs]
            else:
                parts = [Weight(value, partial(values.__setitem__, name))] if torch.is_tensor(value) else []
            yield from (part for part in parts if part.tensor.nbytes >= _SMALL)
