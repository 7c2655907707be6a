"""Attention with sinks, from a kernel without sinks: values and gradients equal those of transformers' gpt-oss in
float64. Plain stand-ins replace flash attention and cuDNN."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.gpt_oss import modeling_gpt_oss

from ftbench.errors import SpecError
from ftbench.kernels import sink_attention
from ftbench.kernels.sink_attention import BatchedSinkAttention, SinkAttention
from ftbench.worker.optimizations import attention

LENGTHS = (5, 1, 11)
BOUNDS = torch.tensor([0, 5, 6, 17, 17], dtype=torch.int32)  # the last sample is empty, as with a fixed shape
TOKENS, HEADS, GROUPS, WIDTH = 17, 6, 3, 8


def seen(window: int) -> torch.Tensor:
    """Return which tokens each token (row) sees: itself and `window` tokens before it in its sample."""
    sample = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    near = distance >= 0 if window < 0 else (distance >= 0) & (distance <= window)
    return near & (sample[:, None] == sample)


def spread(part: torch.Tensor) -> torch.Tensor:
    return part.repeat_interleave(HEADS // part.shape[1], 1)


def scores(query, key, scale, window):
    logits = torch.einsum("qhw,khw->hqk", query, spread(key)) * scale
    return logits.masked_fill(~seen(window), -torch.inf)


def forward(
    query, key, value, b, _b, longest, _l, dropout, causal, debug, *, scale, window_size_left, window_size_right
):
    assert causal
    assert window_size_right == 0
    logits = scores(query, key, scale, window_size_left)
    out = torch.einsum("hqk,khw->qhw", logits.softmax(-1), spread(value))
    return out, logits.logsumexp(-1), torch.empty(2), torch.empty(0), torch.empty(0)


def backward(dout, query, key, value, out, logsum, b, _b, longest, _l, dropout, causal, seed, unused, *, scale,
             window_size_left, window_size_right):  # fmt: skip
    probabilities = (scores(query, key, scale, window_size_left) - logsum[..., None]).exp()
    taken = (dout * out).sum(-1).t()[..., None]
    inner = probabilities * (torch.einsum("qhw,khw->hqk", dout, spread(value)) - taken) * scale

    def together(part):
        return part.unflatten(1, (GROUPS, -1)).sum(2)

    return (
        torch.einsum("hqk,khw->qhw", inner, spread(key)),
        together(torch.einsum("hqk,qhw->khw", inner, query)),
        together(torch.einsum("hqk,qhw->khw", probabilities, dout)),
    )


@pytest.fixture
def flash(monkeypatch):
    monkeypatch.setattr(sink_attention, "FORWARD", forward)
    monkeypatch.setattr(sink_attention, "BACKWARD", backward)


def of_one_length(query, key, scale):
    logits = torch.einsum("shqw,shkw->shqk", query, key.repeat_interleave(HEADS // GROUPS, 1)) * scale
    return logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)


def cudnn_forward(query, key, value, bias, logarithms, dropout, causal, debug, *, scale):
    assert logarithms
    assert causal
    logits = of_one_length(query, key, scale)
    out = logits.softmax(-1) @ value.repeat_interleave(HEADS // GROUPS, 1)
    seed, offset = torch.tensor(3), torch.tensor(4)
    return out, logits.logsumexp(-1, keepdim=True), None, None, query.shape[2], key.shape[2], seed, offset, None


def cudnn_backward(dout, query, key, value, out, logsum, seed, offset, bias, b, _b, longest, _l, dropout, causal,
                   *, scale):  # fmt: skip
    assert (seed, offset, longest, logsum.shape) == (3, 4, query.shape[2], (*query.shape[:3], 1))
    assert dout.transpose(1, 2).is_contiguous()
    probabilities = (of_one_length(query, key, scale) - logsum).exp()
    spread_key, spread_value = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (key, value))
    inner = probabilities * (dout @ spread_value.mT - (dout * out).sum(-1, keepdim=True)) * scale
    together = (part.unflatten(1, (GROUPS, -1)).sum(2) for part in (inner.mT @ query, probabilities.mT @ dout))
    return inner @ spread_key, *together


def drawn() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((TOKENS, HEADS, WIDTH), (TOKENS, GROUPS, WIDTH), (TOKENS, GROUPS, WIDTH), (HEADS,))
    return [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("window", [-1, 3, 0])
def test_values_and_gradients_are_those_of_gpt_oss(flash, window):
    ours, theirs = drawn(), drawn()
    dout = torch.randn(TOKENS, HEADS, WIDTH, dtype=torch.float64)
    out = SinkAttention.apply(*ours, BOUNDS, 11, 0.3, window)
    out.backward(dout)
    layer = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, sinks=theirs[3], training=True)
    rows = [part.transpose(0, 1)[None] for part in theirs[:3]]
    mask = torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(~seen(window), -torch.inf)
    expected = modeling_gpt_oss.eager_attention_forward(layer, *rows, mask, 0.3)[0][0]
    expected.backward(dout)
    torch.testing.assert_close(out, expected)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("window", [None, 9, 6])
def test_samples_of_one_length_are_computed_as_a_batch(flash, monkeypatch, window):
    """2 samples of 8 tokens: values and gradients are the same with cuDNN as with flash attention. A window of 9 tokens
    hides nothing, but cuDNN's kernels do not support one of 6."""
    calls = []

    def counted(*args, **options):
        calls.append(1)
        return cudnn_forward(*args, **options)

    monkeypatch.setattr(sink_attention, "CUDNN_FORWARD", counted)
    monkeypatch.setattr(sink_attention, "CUDNN_BACKWARD", cudnn_backward)
    monkeypatch.setattr("test_sink_attention.LENGTHS", (8, 8))
    monkeypatch.setattr("test_sink_attention.TOKENS", 16)
    ours, theirs = drawn(), drawn()
    given = {"cu_seq_lens_q": torch.tensor([0, 8, 16], dtype=torch.int32), "max_length_q": 8, "scaling": 0.3}
    for cudnn, parts in ((True, ours), (False, theirs)):
        varlen = attention.attention(lambda *args, is_causal: None, cudnn)
        rows = [part.transpose(0, 1)[None] for part in parts[:3]]
        out = varlen(None, *rows, None, s_aux=parts[3], sliding_window=window, **given)[0]
        torch.manual_seed(1)
        out.backward(torch.randn(out.shape, dtype=out.dtype))
        parts.append(out)
    assert len(calls) == (window != 6)
    torch.testing.assert_close(ours[4], theirs[4])
    for one, other in zip(ours[:4], theirs[:4], strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_cudnn_gets_gradients_with_the_same_strides_whatever_is_given(monkeypatch):
    """torch keeps cuDNN's plan for the next gradient, which may have other strides. The stand-in checks them."""
    monkeypatch.setattr(sink_attention, "CUDNN_FORWARD", cudnn_forward)
    monkeypatch.setattr(sink_attention, "CUDNN_BACKWARD", cudnn_backward)
    query, key, value = (part.detach().transpose(0, 1)[None] for part in drawn()[:3])
    query.requires_grad_()
    gradients, dout = [], torch.randn(1, TOKENS, HEADS, WIDTH, dtype=torch.float64).transpose(1, 2)
    for each in (dout, dout.contiguous()):
        query.grad = None
        BatchedSinkAttention.apply(query, key, value, drawn()[3].detach(), 0.3).backward(each)
        gradients.append(query.grad)
    assert torch.equal(*gradients)


def test_frozen_sinks_are_asked_for_no_gradient(flash):
    *parts, sinks = drawn()
    SinkAttention.apply(*parts, sinks.detach(), BOUNDS, 11, 0.3, -1).sum().backward()
    assert parts[0].grad is not None


def test_attention_by_boundaries_hands_sinks_and_window_on(flash):
    query, key, value, sinks = (part.detach() for part in drawn())
    varlen = attention.attention(lambda *args, is_causal: pytest.fail("a kernel without sinks was called"))
    rows = [part.transpose(0, 1)[None] for part in (query, key, value)]
    samples = {"cu_seq_lens_q": BOUNDS, "max_length_q": 11, "scaling": 0.3}
    for given, window in ((None, -1), (4, 3)):
        out, _ = varlen(None, *rows, None, s_aux=sinks, sliding_window=given, **samples)
        expected = SinkAttention.apply(query, key, value, sinks, BOUNDS, 11, 0.3, window)
        torch.testing.assert_close(out[0], expected, atol=0, rtol=0)
    for name, value, feature in (("softcap", 30.0, "softcapping"), ("dropout", 0.1, "the model's attention dropout")):
        with pytest.raises(SpecError, match=f"does not support {feature}"):
            varlen(None, *rows, None, **{name: value}, **samples)


def test_torchs_kernels_take_what_they_are_given():
    """Their shapes, worked out without a GPU: a logarithm for each head and token."""
    query, key = (torch.empty(TOKENS, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (HEADS, GROUPS))
    bounds = torch.empty(4, dtype=torch.int32, device="meta")
    sinks = torch.empty(HEADS, dtype=torch.bfloat16, device="meta")
    out = SinkAttention.apply(query.requires_grad_(), key, key, sinks, bounds, 11, 0.3, 127)
    out.sum().backward()
    assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)
    assert query.grad.shape == query.shape
    query = torch.empty(2, HEADS, TOKENS, 64, dtype=torch.bfloat16, device="meta")
    out = BatchedSinkAttention.apply(query.requires_grad_(), query[:, :GROUPS], query[:, :GROUPS], sinks, 0.3)
    out.sum().backward()
    assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)
    assert query.grad.shape == query.shape
