"""The dispatch mode of a simulation: every operation runs on fake tensors, its allocations are logged, and what is
known of its values is carried along."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ftbench.worker.simulate.functions import Functions
from ftbench.worker.simulate.tracker import Tracker, tensors
from ftbench.worker.simulate.values import Unknown, Values

_DEVICE = torch.ops.prim.device.default
_COPY = torch.ops.aten._to_copy.default
_ADD = torch.ops.aten.add.Tensor
_PIN, _ALIAS = torch.ops.aten._pin_memory.default, torch.ops.aten.alias.default
_META, _CPU, _PLACE = torch.device("meta"), torch.device("cpu"), torch.device("cuda", 0)
_INDEX, _NONZERO = torch.ops.aten.index.Tensor, torch.ops.aten.nonzero.default
_SELECT = torch.ops.aten.select.int
_SCALAR = torch.ops.aten._local_scalar_dense.default
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")


class SimulationMode(TorchDispatchMode):
    """Enter it inside its `fake` mode."""

    def __init__(self, fake: FakeTensorMode, functions: Functions, tracker: Tracker, workspace: int) -> None:
        """`workspace` is what cuBLAS takes in each thread that multiplies, in bytes."""
        super().__init__()
        self.functions = functions
        self.fake, self.tracker, self.values, self.workspace = fake, tracker, Values(), workspace
        self._with_workspace: set[bool] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:
            return self._device(args[0])
        if self.functions.engine and kwargs.get("device") == _META:
            kwargs["device"] = _PLACE
        if any(not isinstance(t, FakeTensor) for t in tensors([*args, *kwargs.values()])):
            args, kwargs = tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        if func is _PIN or (self.functions.engine and func is _COPY and _is_no_copy(args[0], kwargs)):
            func, args, kwargs = _ALIAS, args[:1], {}
        if func is _SCALAR:
            return self.values.scalar(args[0])
        if func._schema.name.startswith("aten::") and func._opname in _PRODUCTS:
            self._multiplies(args)
        try:
            result = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            if func is not _INDEX or self.values.get(args[0]) is not None:
                return self._by_values(func, args, kwargs)
            result = func(args[0], [each for index in args[1] for each in self._positions(index)])
        if self.functions.engine and func is _ADD and result.fake_device.type == "cuda":
            self.tracker.sums(args[0], result)
        for tensor in tensors(result):
            if tensor.fake_device.type == "cuda":
                self.tracker.saw(tensor, func._opname)
        self.values.follow(func, args, kwargs, result)
        return result

    def _device(self, tensor: Any) -> torch.device:
        """Return where a tensor is, as torch's C++ asks. The engine of the backward pass would ask a GPU for its
        streams; what it believes to be of no device it handles as it does the CPU's."""
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else _CPU
        return _META if self.functions.engine and device.type == "cuda" else device

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        fake = self.fake.from_tensor(tensor)
        if self.values.get(fake) is None:
            self.values.learn(fake, tensor)
        return fake

    def _positions(self, index: Any) -> list[Any]:
        """Return an index as the kernel takes it: in place of a mask where it is true, in each dimension."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return [index]
        positions = self._by_values(_NONZERO, (index,), {})
        return [_SELECT(positions, 1, dimension) for dimension in range(index.ndim)]

    def _by_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return an operation whose result's shape depends on values."""
        result = self.values.compute(func, args, kwargs, [])
        if result is None:
            raise Unknown(f"the shape of {func._opname} depends on the model's weights")
        device = next(tensors(list(args))).device

        def make(value: torch.Tensor) -> torch.Tensor:
            with self.fake:
                fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            self.values.learn(fake, value)
            if device.type == "cuda":
                self.tracker.saw(fake, func._opname)
            return fake

        return tree_map_only(torch.Tensor, make, result)

    def _multiplies(self, args: Any) -> None:
        """Take the workspace of a thread's first product: forward and backward run in threads of their own, each with a
        handle of cuBLAS and its workspace."""
        backward = self.tracker.phase == "backward"
        if self.workspace and backward not in self._with_workspace and args[-1].device.type == "cuda":
            self._with_workspace.add(backward)
            self.tracker.persistent(self.workspace, "cublas")


def _is_no_copy(tensor: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a copy would change neither device nor type: asked for because the engine believed otherwise."""
    return (
        isinstance(tensor, FakeTensor)
        and kwargs.get("device") == tensor.fake_device
        and kwargs.get("dtype", tensor.dtype) == tensor.dtype
        and kwargs.get("memory_format") is None
    )
