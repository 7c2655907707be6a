"""A GPU that is not there: torch is told that there is one, and its tensors have no memory."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer as optim
from torch.utils import _foreach_utils

from ftbench.core.hardware import cublas_workspace
from ftbench.worker.simulate.functions import Functions
from ftbench.worker.simulate.guard import ensure_guard, ensure_kernels
from ftbench.worker.simulate.mode import SimulationMode
from ftbench.worker.simulate.tracker import Tracker


@contextmanager
def simulated(capability: tuple[int, int], memory_bytes: int) -> Iterator[SimulationMode]:
    """Let torch have one GPU of that compute capability within the block, where every tensor is fake."""
    ensure_guard()
    ensure_kernels()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    functions = Functions()
    mode = SimulationMode(fake, functions, Tracker(), cublas_workspace(capability))
    with ExitStack() as stack:
        stack.enter_context(whole_kernels())
        for target, name, value in _patches(functions, capability, memory_bytes):
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(functions)
        stack.enter_context(fake)
        stack.enter_context(mode)
        yield mode


@contextmanager
def whole_kernels() -> Iterator[None]:
    """Make one kernel of operations within the block that are one on a GPU and that torch takes apart for tensors
    without memory: the gradient of silu would be eight tensors, and is one
    (aten/src/ATen/native/native_functions.yaml)."""
    library = torch.library.Library("aten", "IMPL")
    library.m.impl("silu_backward", "CUDA", lambda gradient, given: torch.empty_like(given))
    try:
        yield
    finally:
        library._destroy()


def _patches(functions: Functions, capability: tuple[int, int], memory_bytes: int) -> list[tuple[Any, str, Any]]:
    device = torch.device("cuda", 0)
    properties = SimpleNamespace(
        name="simulated",
        major=capability[0],
        minor=capability[1],
        total_memory=memory_bytes,
        gcnArchName="",
    )
    known = [*optim._foreach_supported_types, FakeTensor]

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return [
        (torch.autograd, "_engine_run_backward", functions.within_engine(torch.autograd._engine_run_backward)),
        (FakeTensorMode, "avoid_device_init", True),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "is_initialized", lambda: False),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "set_device", nothing),
        (torch.cuda, "synchronize", nothing),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda, "mem_get_info", lambda *_: (memory_bytes, memory_bytes)),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: capability >= (8, 0)),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "_lazy_init", nothing),
        (torch.accelerator, "is_available", lambda: True),
        (torch.accelerator, "current_accelerator", lambda *_, **__: device),
        (torch.accelerator, "current_device_index", lambda: 0),
        (torch.accelerator, "current_stream", lambda *_: SimpleNamespace(is_capturing=lambda: False)),
        (torch.accelerator, "synchronize", nothing),
        # The batched forms of the optimizers: they hold more at a time, and torch takes them for its own tensors only.
        (optim, "_foreach_supported_types", known),
        (_foreach_utils, "_foreach_supported_types", known),
        # Moving a module swaps its fake tensors, which the fake mode's memo of them, a weak one, must not forbid.
        (torch.utils, "weakref", SimpleNamespace(getweakrefs=lambda _: [])),
        # transformers takes other ways for fake tensors; here their values are known where it asks.
        (transformers.utils.import_utils, "is_fake_tensor", lambda _: False),
    ]
