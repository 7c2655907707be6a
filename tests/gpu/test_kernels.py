"""Our Triton kernels compute, forward and backward, what plain torch computes in float64: compiled on a GPU, by
Triton's interpreter on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tritons import DEVICE, module, torch

rms_norm, rotary, swiglu = (module(f"kernels.{name}") for name in ("rms_norm", "rotary", "swiglu"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-6
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def drawn(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE).to(dtype)


def with_room(x, columns=7):
    """x in a buffer that is wider; what lies there is no number."""
    return torch.cat([x, torch.full_like(x[:, :1], torch.nan).expand(-1, columns)], 1)


def check(ours, plain, *given, dtype):
    """Outputs and gradients of all inputs that want one, within a few of the type's roundings of float64's."""
    torch.manual_seed(0)
    mine = [part.to(dtype).requires_grad_() for part in given]
    theirs = [part.detach().double().requires_grad_() for part in mine]
    outputs, expected = ours(*mine), plain(*theirs)
    gradients = [torch.randn_like(part) for part in outputs]
    torch.autograd.backward(outputs, gradients)
    torch.autograd.backward(expected, [part.double() for part in gradients])
    pairs = [*zip(outputs, expected, strict=True), *((a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))]
    for one, other in pairs:
        assert one.dtype == dtype
        assert one.shape == other.shape
        assert (one.double() - other).norm() <= 4 * torch.finfo(dtype).eps * other.norm()


@each_dtype
@pytest.mark.parametrize(("tokens", "inner"), [(1, 96), (3, 1100), (5, 130)])
@pytest.mark.parametrize("joined", [True, False], ids=["joined", "apart"])
def test_the_gate_of_an_mlp(tokens, inner, joined, dtype):
    def ours(gate, up):
        if joined:
            return (swiglu.SwiGlu.apply(with_room(torch.cat([gate, up], 1)), None, inner),)
        return (swiglu.SwiGlu.apply(gate, up, inner),)

    both = drawn(tokens, inner), drawn(tokens, inner)
    check(ours, lambda gate, up: (torch.nn.functional.silu(gate) * up,), *both, dtype=dtype)


def plain_norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight.double()


@each_dtype
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (5, 100), (2, 1536)])
def test_a_norm_and_what_else_reads_its_input(tokens, width, dtype):
    weight = drawn(width, dtype=dtype)

    def ours(x):
        normed, same = rms_norm.RmsNorm.apply(x, weight, EPS, 6)
        return normed[:, :width], same

    check(ours, lambda x: (plain_norm(x, weight), x.clone()), drawn(tokens, width), dtype=dtype)


@each_dtype
@pytest.mark.parametrize(("tokens", "width", "room"), [(1, 64, 0), (5, 100, 3), (2, 1536, 64)])
def test_a_sum_and_its_norm(tokens, width, room, dtype):
    weight = drawn(width, dtype=dtype)

    def ours(x, residual):
        normed, total = rms_norm.SumRmsNorm.apply(with_room(x, room) if room else x, residual, weight, EPS, 2 * room)
        return normed[:, :width], total

    both = drawn(tokens, width), drawn(tokens, width)
    check(ours, lambda x, residual: (plain_norm(x + residual, weight), x + residual), *both, dtype=dtype)


def angles(positions, width, dtype):
    angle = torch.rand(positions, width, dtype=torch.float64, device=DEVICE) * 6
    return angle.cos().to(dtype), angle.sin().to(dtype)


def turned(x, width, weight, cos, sin):
    heads = x.unflatten(1, (-1, width))
    heads = heads if weight is None else plain_norm(heads, weight)
    first, second = heads.chunk(2, -1)
    again = len(x) // len(cos)
    cos, sin = (part.double().repeat(again, 1)[:, None] for part in (cos, sin))
    return heads * cos + torch.cat([-second, first], -1) * sin


@each_dtype
@pytest.mark.parametrize(("heads", "pairs", "width"), [(3, 1, 16), (4, 2, 24), (2, 2, 128)])
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "as they are"])
@pytest.mark.parametrize("joined", [True, False], ids=["joined", "apart"])
def test_queries_and_keys_as_attention_reads_them(heads, pairs, width, normed, joined, dtype):
    """Of two rows of three tokens; attention hands the gradients back with the heads first."""
    weights = [drawn(width, dtype=dtype) if normed else None for _ in range(2)]
    cos, sin = angles(3, width, dtype)
    sizes = [heads * width, pairs * width, pairs * width]

    def ours(*parts):
        given = (with_room(torch.cat(parts, 1)), None, None) if joined else parts
        made = rotary.RotaryHeads.apply(*given, sizes, *weights, cos, sin, EPS)
        return [part.transpose(0, 1).contiguous() for part in made]

    def plain(query, key, value):
        made = [turned(x, width, w, cos, sin) for x, w in zip((query, key), weights, strict=True)]
        return [part.transpose(0, 1) for part in (*made, value.unflatten(1, (-1, width)))]

    check(ours, plain, *(drawn(6, size) for size in sizes), dtype=dtype)


OPERATORS = {
    "swiglu_backward": lambda: (swiglu.swiglu_backward, drawn(3, 40), drawn(3, 40), drawn(3, 40), 8),
    "rms_norm_forward": lambda: (rms_norm.rms_norm_forward, drawn(3, 48), drawn(3, 40), drawn(40), EPS, 8),
    "rms_norm_forward alone": lambda: (rms_norm.rms_norm_forward, drawn(3, 40), None, drawn(40), EPS, 0),
    "rms_norm_backward": lambda: (
        rms_norm.rms_norm_backward, drawn(3, 48), drawn(3, 40), drawn(3, 40), drawn(40), EPS, 8, torch.bfloat16,
    ),
    "rotary_forward": lambda: (
        rotary.rotary_forward, drawn(4, 32), drawn(4, 16), drawn(4, 16), drawn(16), drawn(16),
        *angles(2, 16, torch.float32), EPS,
    ),
    "rotary_backward": lambda: (
        rotary.rotary_backward, drawn(4, 2, 16), drawn(4, 1, 16), drawn(4, 1, 16), drawn(4, 32), drawn(4, 16),
        drawn(16), drawn(16), *angles(2, 16, torch.float32), EPS, 8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_the_compiler_is_told_the_shapes_that_come_out(name):
    """By torch's own check of a custom operator: it changes nothing it is given, and its fake half agrees."""
    operator, *given = OPERATORS[name]()
    given = [part.float() if isinstance(part, torch.Tensor) else part for part in given]
    torch.library.opcheck(operator, tuple(given), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.exhaustive
def test_every_kernel_compiles_for_ampere_hopper_and_blackwell(tmp_path):
    """On any machine: the interpreter takes what the compiler does not."""
    script = Path(__file__).parents[1] / "compile_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(script), "80", "90", "120"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3 * 2 * 5
