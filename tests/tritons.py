"""Our Triton kernels for a test: compiled on a GPU, run by Triton's interpreter (conftest.py) on a CPU."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training libraries are not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter fails in this kernel with numpy 2.4")


def module(name: str) -> Any:
    """Return a module of ftbench with kernels, or skip."""
    if DEVICE == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("no usable GPU, and Triton is not set to interpret", allow_module_level=True)
    pytest.importorskip("triton", reason="triton is not installed")
    return importlib.import_module(f"ftbench.{name}")
