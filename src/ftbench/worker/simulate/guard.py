"""Autograd on fake GPU tensors asks torch for the GPU's device guard. A build of torch for CUDA has one, which torch
itself replaces by one that does nothing where there is no GPU; a build for the CPU alone has none to replace."""

import ctypes
from pathlib import Path

import torch

_CUDA = 1  # c10::DeviceType::CUDA
_REGISTRAR = "_ZN3c104impl24DeviceGuardImplRegistrarC1ENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"
_METHODS = 64  # more than a device guard has
# One kernel on a GPU, a formula of several operations where there is none: a build for the CPU takes the formula for
# the GPU's tensors, and its temporaries with it (native_functions.yaml, CompositeImplicitAutograd beside CUDA).
_ONE_KERNEL = ("silu_backward", "mish_backward", "_fused_rms_norm")
_kept: list[object] = []  # what torch holds pointers to


def ensure_guard() -> None:
    """Give torch the guard that does nothing. A build for the CPU is first given one that counts no devices, which is
    what torch replaces (c10/core/impl/DeviceGuardImplInterface.cpp, ensureCUDADeviceGuardSet)."""
    if not torch.cuda._is_compiled() and not _kept:
        signature = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        zero = signature(lambda this: 0)
        table = (ctypes.c_void_p * _METHODS)(*[ctypes.cast(zero, ctypes.c_void_p).value] * _METHODS)
        guard = ctypes.c_void_p(ctypes.addressof(table))
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        library[_REGISTRAR](ctypes.create_string_buffer(8), ctypes.c_int8(_CUDA), ctypes.byref(guard))
        _kept.extend((zero, table, guard))
    torch._C._ensureCUDADeviceGuardSet()


def ensure_kernels() -> None:
    """Make the GPU's single kernels known to a build of torch for the CPU. They are never run: fake tensors ask for the
    shape of their results alone."""
    missing = [
        name for name in _ONE_KERNEL if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")
    ]
    if missing:
        library = torch.library.Library("aten", "IMPL")
        for name in missing:
            library.impl(name, _never, "CUDA")
        _kept.append(library)


def _never(*args: object, **kwargs: object) -> None:
    raise AssertionError("a fake tensor's kernel was run")
