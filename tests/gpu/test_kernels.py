"""Our Triton kernels compute, forward and backward, what plain torch computes in float64: compiled on a GPU, by
Triton's interpreter on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from methods import CAPABILITY

from tritons import DEVICE, module, torch

NAMES = ("adamw", "adapted_swiglu", "adapter_copies", "delayed_cast", "four_bit_weights", "rms_norm",
         "rotary", "sink_attention", "swiglu", "transposed_cast")  # fmt: skip
adamw, adapted_swiglu, adapter_copies, delayed_cast, four_bit_weights, rms_norm, *others = (
    module(f"kernels.{name}") for name in NAMES
)
rotary, sink_attention, swiglu, transposed_cast = others
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-6
pytestmark = [pytest.mark.gpu] * (DEVICE == "cuda")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def drawn(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE).to(dtype)


def with_room(x, columns=7):
    """Return x in a wider buffer whose other columns are NaN."""
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
@pytest.mark.parametrize("double", [True, False], ids=["double quantization", "scales in 32 bits"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_dequantized_matrix_equals_that_of_bitsandbytes(kind, double, dtype):
    nn = pytest.importorskip("bitsandbytes").nn
    options = {"requires_grad": False, "quant_type": kind, "compress_statistics": double}
    weights = [nn.Params4bit(drawn(rows, 192, dtype=dtype), **options).to(DEVICE) for rows in (96, 1100)]
    expected = torch.cat(
        [sys.modules["bitsandbytes"].functional.dequantize_4bit(w.data, w.quant_state) for w in weights]
    )
    stored = [four_bit_weights.tensors_of(weight) for weight in weights]
    a, b = drawn(7, 192, dtype=dtype), drawn(1196, 7, dtype=dtype)
    wide = four_bit_weights.augmented_weight(a, b, [*stored[0], *stored[1]], len(stored[0]), None)
    rounding = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0}  # Triton's interpreter truncates to 16 bits
    torch.testing.assert_close(wide[:1196, :192], expected, **rounding)
    assert torch.equal(wide[1196:, :192], a)
    assert torch.equal(wide[:1196, 192:], b)
    assert not wide[1196:, 192:].any()
    made = torch.full((96, 256), torch.nan, dtype=dtype, device=DEVICE)
    four_bit_weights.by_triton(made[:, :192], *stored[0])
    torch.testing.assert_close(made[:, :192], expected[:96], **rounding)
    assert made[:, 192:].isnan().all()


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
    """Two rows of three tokens; attention returns the gradients with the heads first."""
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


SMALL = (torch.float8_e4m3fn, torch.float8_e5m2)
ROOM = dict(zip(SMALL, (2, 16), strict=True))  # times the largest magnitude of the step before
with_8_bits = pytest.mark.skipif(DEVICE == "cuda" and CAPABILITY < (8, 9), reason="no numbers of 8 bits")


def held(small, factor):
    """What 8 bits hold, in float64."""
    return small.float().double() * factor.double()


def numbers_of(small, *shape, dtype):
    """Values that 8 bits hold at a scale that is a power of two: Triton's interpreter does not round as a GPU does."""
    top = torch.finfo(small).max
    x = (drawn(*shape) * top / 8).clamp(-top, top).to(small).double()
    x[0, 0] = -top
    return (torch.where(x.abs() < top / 64, 0.0, x) / 2**12).to(dtype)


@with_8_bits
@each_dtype
@pytest.mark.parametrize("small_dtype", SMALL, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (3, 1100), (5, 4096)])
def test_a_cast_scaled_by_the_step_before(shape, small_dtype, dtype):
    torch.manual_seed(0)
    x = numbers_of(small_dtype, *shape, dtype=dtype)
    largest, limit = x.abs().max().item(), torch.finfo(small_dtype).max
    room = ROOM[small_dtype]
    for known, expected in ((0, largest), *((largest / part, largest / part * room) for part in (1, room, 2 * room))):
        maxima = torch.tensor([known, 0.0], device=DEVICE)
        small, factor = delayed_cast.cast_by_last(x, maxima, small_dtype)
        assert factor.item() == pytest.approx(expected / limit), "the first step takes its own maximum"
        assert torch.equal(held(small, factor), x.double().clamp(-expected, expected)), "up to the room, exact"
        assert maxima.tolist() == [known, largest]


@with_8_bits
@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter does not round as a GPU does")
@pytest.mark.parametrize("small_dtype", SMALL, ids=str)
def test_a_cast_rounds_to_the_nearest(small_dtype):
    x = drawn(300, 4096, dtype=torch.bfloat16)
    small, _ = delayed_cast.cast_by_last(x, torch.tensor([4.0 / ROOM[small_dtype], 0.0], device=DEVICE), small_dtype)
    limit = torch.finfo(small_dtype).max
    assert torch.equal(small.float(), (x.float() * (limit / 4.0)).clamp(-limit, limit).to(small_dtype).float())
    scale = torch.tensor(limit / x.abs().max().item(), device=DEVICE)
    expected = (x.float() * scale).clamp(-limit, limit).to(small_dtype)
    small, turned = transposed_cast.cast_layouts(x, scale, small_dtype, True)
    assert torch.equal(small.float(), expected.float())
    assert torch.equal(turned.float(), expected.float().t())


@with_8_bits
def test_a_cast_of_rows_that_are_not_together_and_of_nothing_but_zeros():
    x = numbers_of(SMALL[0], 5, 48, dtype=torch.float32)[:, :32]
    small, factor = delayed_cast.cast_by_last(x, torch.zeros(2, device=DEVICE), SMALL[0])
    assert torch.equal(held(small, factor), x.double())
    small, factor = delayed_cast.cast_by_last(x * 0, torch.zeros(2, device=DEVICE), SMALL[0])
    assert held(small, factor).abs().max() == 0


@with_8_bits
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("small_dtype", SMALL, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (130, 70), (256, 192)])
def test_a_cast_in_both_directions(shape, small_dtype, dtype):
    torch.manual_seed(0)
    x = numbers_of(small_dtype, *shape, dtype=dtype)
    scale = torch.tensor(torch.finfo(small_dtype).max / x.abs().max().item(), device=DEVICE)
    small, turned = transposed_cast.cast_layouts(x, scale, small_dtype, True)
    assert torch.equal(held(small, 1 / scale), x.double())
    for copy in (turned, transposed_cast.cast_layouts(x, scale, small_dtype, False)[1]):
        assert copy.is_contiguous()
        assert torch.equal(copy.t().double(), small.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_adapters_are_copied_at_once(dtype):
    def drawn_copies():
        torch.manual_seed(0)
        wide = torch.full((3, 700, 24), torch.nan, device=DEVICE, dtype=torch.bfloat16)
        # bfloat16 values and powers of two, because Triton's interpreter does not round as a GPU does
        sources = [drawn(*shape, dtype=torch.bfloat16).to(dtype) for shape in ((50, 8), (9, 24), (700, 16))]
        targets = [wide[0][:50, 8:16], wide[1][:9], wide[2][:, :16]]
        return wide, [*zip(targets, sources, (2.0, 1.0, 0.5), strict=True)]

    (expected, plain), (found, ours) = drawn_copies(), drawn_copies()
    adapter_copies.by_torch(plain)
    copies = adapter_copies.AdapterCopies(lambda: ours)
    copies()
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)
    found.fill_(torch.nan)
    copies.by_triton()
    torch.testing.assert_close(found, expected, atol=0, rtol=0, equal_nan=True)
    ours[0][1].data = ours[0][1] * 2  # the adapter moved
    found.fill_(torch.nan)
    copies()
    copies.by_triton()
    torch.testing.assert_close(found[0][:50, 8:16], 2 * expected[0][:50, 8:16], atol=0, rtol=0)


def around_a_gate(tokens, inner, rank, down, dtype):
    """The gradient, gate and up, mid and B of their adapters, down's gradient of mid and A: parts of wider buffers."""
    torch.manual_seed(0)
    shapes = ((tokens, inner), (tokens, 2 * inner), (tokens, rank), (2 * inner, rank), (tokens, down), (down, inner))
    dout, base, *thin = (drawn(*shape, dtype=dtype) for shape in shapes)
    return [dout, base, *(with_room(part)[:, : part.shape[1]] for part in thin)]


def plain_gate(dout, base, mid, b, thin, a):
    """In float64: silu(gate) * up, its product with a', the gradient of [gate up], and those of mid, b and a."""
    dout, base, mid, b, thin, a = (part.double() for part in (dout, base, mid, b, thin, a))
    both = (base + mid @ b.t()).requires_grad_()
    gate, up = both.chunk(2, 1)
    gated = torch.nn.functional.silu(gate) * up
    (gradient,) = torch.autograd.grad(gated, both, dout + thin @ a)
    gated = gated.detach()
    return gated, gated @ a.t(), gradient, (gradient @ b, gradient.t() @ mid, thin.t() @ gated)


def near(found, expected, dtype):
    assert found.dtype == dtype
    assert (found.double() - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


SHAPES = [(1, 96, 16, 8), (67, 130, 6, 3), (520, 40, 32, 16)]  # the last has several tiles of rows a program
each_gate = pytest.mark.parametrize(("tokens", "inner", "rank", "down"), SHAPES)
# No recipe uses these kernels in float32, and they take a minute to compile.
each_gate_dtype = pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.exhaustive), *DTYPES[1:]], ids=str
)


@with_8_bits
@each_gate_dtype
@pytest.mark.parametrize("known", [0.0, 0.7])
@each_gate
def test_a_gate_with_adapters_and_its_gradient_written_in_8_bits(tokens, inner, rank, down, known, dtype):
    _, base, mid, b, _, a = given = around_a_gate(tokens, inner, rank, down, dtype)
    gated, down_mid, gradient, thin_ones = plain_gate(*given)
    maxima = torch.tensor([[known, 0.0], [known, 0.0]], device=DEVICE)
    small, factor, found = adapted_swiglu.gate_and_cast(base, mid, b, a, maxima[0], SMALL[0])
    near(found, down_mid, dtype)
    back, back_factor, *founds = adapted_swiglu.gate_gradients(*given, maxima[1], SMALL[1])
    for one, other in zip(founds, thin_ones, strict=True):
        near(one, other, dtype)
    casts = ((small, factor, gated), (back, back_factor, gradient))
    for (eight, scale, plain), (_, seen) in zip(casts, maxima, strict=True):
        assert seen.item() == pytest.approx(plain.abs().max().item(), rel=1e-4)
        limit = torch.finfo(eight.dtype).max
        assert scale.item() == pytest.approx((ROOM[eight.dtype] * known or seen.item()) / limit, rel=1e-6)
        within = plain.clamp(-limit * scale.item(), limit * scale.item())
        assert (held(eight, scale) - within).norm() <= 0.2 * within.norm(), "two bits, cut off by the interpreter"


@with_8_bits
@each_gate_dtype
def test_gates_far_from_zero(dtype):
    """exp(-gate) is 0 or infinite, so silu(gate) is gate or 0, and its derivative 1 or 0."""
    gate = torch.tensor([[-1e4, -200.0, 200.0, 1e4]], device=DEVICE, dtype=dtype)
    base, up = torch.cat([gate, torch.full_like(gate, 0.5)], 1), 0.5
    none = torch.zeros(1, 16, device=DEVICE, dtype=dtype)
    a, b = torch.zeros(16, 4, device=DEVICE, dtype=dtype), torch.zeros(8, 16, device=DEVICE, dtype=dtype)
    maxima = torch.zeros(2, 2, device=DEVICE)
    small, factor, _ = adapted_swiglu.gate_and_cast(base, none, b, a, maxima[0], SMALL[0])
    silu = gate.double().relu()
    torch.testing.assert_close(held(small, factor), silu * up, rtol=0.1, atol=0)
    back, factor, *_ = adapted_swiglu.gate_gradients(torch.ones_like(gate), base, none, b, none, a, maxima[1], SMALL[1])
    expected = torch.cat([(silu > 0) * up, silu], 1)
    torch.testing.assert_close(held(back, factor), expected, rtol=0.2, atol=0)


def test_maxima_go_from_step_to_step_and_past_evaluations():
    """Known and seen of one number: after each pass that saw this much."""
    model, maxima = torch.nn.Linear(1, 1), delayed_cast.Maxima(1, DEVICE)
    one = maxima.values[0, 0]
    found = []
    for training, seen in ((True, 3), (True, 0), (False, 9), (True, 4), (True, float("inf")), (True, 1), (True, 1)):
        maxima.next_pass(model.train(training))
        found.append(one[0].item())
        one[1] = seen
        maxima.end_pass(model)
    assert found == [0, 3, 3, 3, 4, 4, 1]


OPERATORS = {
    "cast_by_last": lambda: (delayed_cast.cast_by_last, drawn(3, 40), drawn(2).abs(), torch.float8_e5m2),
    "cast_layouts": lambda: (
        transposed_cast.cast_layouts, drawn(3, 40, dtype=torch.bfloat16), drawn(1).float()[0], torch.float8_e5m2, True,
    ),
    "cast_layouts of a known input": lambda: (
        transposed_cast.cast_layouts, drawn(3, 40, dtype=torch.bfloat16), drawn(1).float()[0], torch.float8_e4m3fn,
        False,
    ),
    "gate_and_cast": lambda: (
        adapted_swiglu.gate_and_cast, drawn(3, 40), drawn(3, 8), drawn(40, 8), drawn(4, 20), drawn(2).abs(),
        torch.float8_e4m3fn,
    ),
    "gate_gradients and cast": lambda: (
        adapted_swiglu.gate_gradients, drawn(3, 20), drawn(3, 40), drawn(3, 8), drawn(40, 8), drawn(3, 4), drawn(4, 20),
        drawn(2).abs(), torch.float8_e5m2,
    ),
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
    given = [part.float() if getattr(part, "dtype", None) == torch.float64 else part for part in given]
    checks = ("test_schema",) if "cast" not in name else ()  # which writes what nothing reads until later
    torch.library.opcheck(operator, tuple(given), test_utils=(*checks, "test_faketensor"))


@pytest.mark.exhaustive
def test_every_kernel_compiles_for_ampere_hopper_and_blackwell(tmp_path):
    """On any machine, because the interpreter accepts code that the compiler rejects."""
    script = Path(__file__).parents[1] / "compile_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(script), "80", "90", "120"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3 * 2 * 14


ADAMW = {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.1, "eps": 1e-8}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_of_adamw_are_torchs(dtype):
    """Three steps of gradients that are halved; weights in 16 bits, each up or down, are as far as their last bit."""
    torch.manual_seed(0)
    weight, size = drawn(3001, dtype=dtype), 3001
    plain = torch.nn.Parameter(weight.double())
    oracle = torch.optim.AdamW([plain], **ADAMW)
    moments = [torch.zeros_like(weight) for _ in range(2)]
    for step in range(1, 4):
        gradient = drawn(size, dtype=dtype)
        plain.grad = gradient.double() / 2
        oracle.step()
        adamw.adamw_step(weight, gradient, *moments, torch.tensor(0.5, device=DEVICE), step, 977 * step, ADAMW)
    apart = 3 * torch.finfo(dtype).eps * (plain.abs() + 1e-2)  # a rounding a step
    assert ((weight.double() - plain).abs() <= apart).all()
    torch.testing.assert_close(moments[0].double(), oracle.state[plain]["exp_avg"], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("seed", [1, 77_777, (1 << 31) - 1])
def test_a_step_below_half_a_bit_moves_weights_by_as_much_on_average(seed):
    """Below 1 two bfloat16 values are 2^-8 apart: one weight in 39 takes a step of 1e-4. The mean of n such choices
    has a standard deviation of sqrt(q (1 - q) / n) of that distance. The same holds for the second moment."""
    n, step, apart = 1 << 18, 1e-4, 2.0**-8
    weight, gradient = torch.ones(2, n, dtype=torch.bfloat16, device=DEVICE)
    moments = torch.zeros_like(weight), torch.ones_like(weight) * 0.5
    factor, rate = torch.tensor(1.0, device=DEVICE), step * (0.5005 / 0.001) ** 0.5
    adamw.adamw_step(weight, gradient, *moments, factor, 1, seed, ADAMW | {"lr": rate, "weight_decay": 0.0})
    for moved, expected in ((1 - weight.double(), step), (moments[1].double() - 0.5, 0.0005)):
        share = expected / apart
        assert abs(moved.mean().item() - expected) <= 5 * apart * (share * (1 - share) / n) ** 0.5


@pytest.mark.skipif(DEVICE == "cpu", reason="flash attention and cuDNN need a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_with_sinks(compiled):
    """Samples of one length, by boundaries with flash attention and as a batch with cuDNN."""
    samples, tokens, heads, groups, width, scale = 3, 320, 8, 2, 64, 0.125
    bounds = torch.arange(0, samples * tokens + 1, tokens, device=DEVICE, dtype=torch.int32)

    def by_boundaries(query, key, value, sinks):
        parts = [part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)]
        out = sink_attention.SinkAttention.apply(*parts, sinks, bounds, tokens, scale, -1)
        return (out.unflatten(0, (samples, tokens)).transpose(1, 2),)

    def as_a_batch(query, key, value, sinks):
        return (sink_attention.BatchedSinkAttention.apply(query, key, value, sinks, scale),)

    def plain(query, key, value, sinks):
        key, value = (part.repeat_interleave(heads // groups, 1) for part in (key, value))
        hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=DEVICE).triu(1)
        logits = (query @ key.mT * scale).masked_fill(hidden, -torch.inf)
        with_sinks = torch.cat([logits, sinks[:, None, None].expand(samples, heads, tokens, 1)], -1)
        return (with_sinks.softmax(-1)[..., :-1] @ value,)

    shapes = ((samples, heads, tokens, width), *((samples, groups, tokens, width),) * 2)
    for ours in (by_boundaries, as_a_batch):
        torch.manual_seed(1)
        given = [drawn(*(shape[i] for i in (0, 2, 1, 3))).transpose(1, 2) for shape in shapes]
        check(torch.compile(ours) if compiled else ours, plain, *given, drawn(heads), dtype=torch.bfloat16)
