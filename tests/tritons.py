"""Our Triton kernels for a test: compiled on a GPU, run by Triton's interpreter (conftest.py) on a CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training libraries are not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def module(name: str) -> Any:
    """A module of the worker with kernels, or a skip."""
    if DEVICE == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("no usable GPU, and Triton is not set to interpret", allow_module_level=True)
    return pytest.importorskip(f"ftbench.worker.{name}", reason="triton is not installed")
