"""Keep activations for the backward pass in pinned host memory.

The copies run on a separate CUDA stream. A tensor is copied to the host while the next layers compute. When the
backward pass reads tensor n, the copy of tensor n - 1 to the device starts. The module uses torch's saved-tensor hooks.
With non-reentrant checkpointing, autograd only saves a layer's input (torch.utils.checkpoint, `_NoopSaveInputs`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

_SMALL = 1 << 20  # bytes; smaller tensors stay on the GPU, because copying them costs more than it saves


class Kept:
    """Host copy of a tensor that autograd saved. `before` refers to the tensor that was saved before this tensor.
    `back` is the copy on the device, or None if this copy has not started."""

    __slots__ = ("__weakref__", "back", "before", "copied", "device", "fetched", "host")

    def __init__(self, host: torch.Tensor, device: torch.device, before: weakref.ref[Kept] | None) -> None:
        self.host, self.device, self.before = host, device, before
        self.back: torch.Tensor | None = None
        self.copied: Any = None  # event: the copy to the host is complete
        self.fetched: Any = None  # event: the copy to the device is complete


class HostTensors:
    """Copies saved tensors to the host and back. `moved` and `moved_bytes` count tensors and bytes copied to the host.
    `fetched` counts tensors copied back to the device."""

    def __init__(self) -> None:
        self.moved = self.moved_bytes = self.fetched = 0
        self._streams: dict[torch.device, Any] = {}
        self._last: weakref.ref[Kept] | None = None

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapped `function`. The tensors that autograd saves during a call are kept on the host."""

        def keeping(*args: Any, **kwargs: Any) -> Any:
            with saved_tensors_hooks(self._pack, self._unpack):
                return function(*args, **kwargs)

        return keeping

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Kept:
        on_gpu = tensor.device.type == "cuda"
        if not tensor.is_floating_point() or (on_gpu and tensor.nbytes < _SMALL):
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        kept = Kept(host, tensor.device, self._last)
        if on_gpu:
            stream = self._stream(tensor.device)
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                host.copy_(tensor, non_blocking=True)
                kept.copied = stream.record_event()
            tensor.record_stream(stream)  # the allocator must not reuse the memory before the copy is complete
        else:
            host.copy_(tensor)
        self._last = weakref.ref(kept)
        self.moved += 1
        self.moved_bytes += tensor.nbytes
        return kept

    def _unpack(self, kept: torch.Tensor | Kept) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        if kept.back is None:
            self._fetch(kept)
        tensor, kept.back = kept.back, None
        assert tensor is not None
        self.fetched += 1
        if kept.device.type == "cuda":
            current = torch.cuda.current_stream(kept.device)
            current.wait_event(kept.fetched)
            tensor.record_stream(current)
            before = kept.before() if kept.before is not None else None
            if before is not None and before.back is None:
                self._fetch(before)
        return tensor

    def _fetch(self, kept: Kept) -> None:
        """Start to copy `kept.host` back to the device. The event `kept.fetched` marks the end of the copy."""
        if kept.device.type != "cuda":
            kept.back = kept.host.clone()
            return
        stream = self._stream(kept.device)
        with torch.cuda.stream(stream):
            stream.wait_event(kept.copied)
            kept.back = kept.host.to(kept.device, non_blocking=True)
            kept.fetched = stream.record_event()

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]
