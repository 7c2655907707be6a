"""What a GPU would keep the host waiting for within a step, found in a simulated one."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from ftbench.spec.experiment import Experiment
from ftbench.store.rundir import RunDir
from ftbench.worker.simulate import gpu, run
from ftbench.worker.simulate.mode import SimulationMode

PARTS = ("forward", "loss", "backward", "optimizer")
VALUES = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "equal"}
INDEXED = {"index", "index_put", "index_put_"}


def waits(spec: Experiment, directory: RunDir) -> list[str]:
    """Simulate two steps and return what of them waits, each with the function that asks for it."""
    found: set[str] = set()

    class Watching(SimulationMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if self.tracker.phase in PARTS and _waits(func, args, kwargs or {}):
                found.add(f"{func._opname} in {next(_callers())}")
            return super().__torch_dispatch__(func, types, args, kwargs)

    with mock.patch.object(gpu, "SimulationMode", Watching):
        run.simulate(spec, directory, (9, 0), 141 * 10**9)
    return sorted(found)


def _waits(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether an operation of a GPU's tensors ends on the host: values are read, a shape depends on them, or
    bytes are copied there or back while it waits."""
    places = [_place(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    name, types = func._opname, [each.dtype for each in tree_leaves(args[1:]) if isinstance(each, torch.Tensor)]
    if name in ("_to_copy", "copy_"):
        target = [torch.device(kwargs["device"]).type] if kwargs.get("device") else []
        waiting = not (kwargs.get("non_blocking") or args[2:3] == (True,))
        return waiting and {*places, *target} == {"cpu", "cuda"}
    by_mask = name in INDEXED and torch.bool in types
    lengths = name == "repeat_interleave" and kwargs.get("output_size") is None
    return "cuda" in places and (name in VALUES or by_mask or lengths)


def _place(tensor: Any) -> str:
    return str(getattr(tensor, "fake_device", tensor.device).type)


def _callers() -> Iterator[str]:
    """Yield the functions on the stack, the innermost first, without torch's and the simulation's."""
    for frame in reversed(traceback.extract_stack()):
        if not any(part in frame.filename for part in ("/torch/", "/simulate/", __file__)):
            yield f"{frame.filename.rpartition('/')[2]} {frame.name}"
