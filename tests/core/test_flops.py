import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftbench.core.flops import (
    MatmulShape,
    attention_per_token,
    hardware_flops,
    head_per_token,
    linear_per_token,
    linear_recompute_per_token,
    model_flops,
)


def shape(base=1000, base_trained=0, head=100, head_trained=0, adapters=0, widths=(), windows=None):
    return MatmulShape(
        base, base_trained, head, head_trained, adapters, tuple(widths), tuple(windows or [None] * len(widths))
    )


def test_full_training_takes_six_flops_per_weight_and_token():
    assert linear_per_token(shape(base=1000, base_trained=1000)) == 6 * 1000
    assert head_per_token(shape(head=100, head_trained=100)) == 6 * 100


def test_lora_takes_four_flops_per_frozen_and_six_per_adapter_weight():
    assert linear_per_token(shape(base=1000, adapters=10)) == 4 * 1000 + 6 * 10
    assert head_per_token(shape(head=100, adapters=10)) == 4 * 100


def test_the_output_head_is_counted_separately():
    assert linear_per_token(shape(head=100, head_trained=100)) == linear_per_token(shape(head=0))
    assert head_per_token(shape(base=1000, base_trained=1000, adapters=10)) == head_per_token(shape(base=0))


def test_recomputation_is_one_forward_pass_without_the_output_head():
    assert linear_recompute_per_token(shape(base=900, head=100, adapters=10)) == 2 * (900 + 10)


def causal_attention(length, width, window):
    """Return the FLOPs of one layer's forward pass, summed over positions: scores and values for all visible keys. The
    own key counts half, as in half of the square."""
    keys = sum(min(position, window or length) - 0.5 for position in range(1, length + 1))
    return 2 * 2 * width * keys


@settings(max_examples=30)
@given(st.integers(1, 300), st.integers(1, 64), st.one_of(st.none(), st.integers(1, 400)))
def test_attention_agrees_with_counting_keys(length, width, window):
    counted = attention_per_token(shape(widths=[width], windows=[window]), length, passes=1) * length
    reference = causal_attention(length, width, window)
    within_half_a_key = 2 * 2 * width * 0.5 * length
    assert abs(counted - reference) <= within_half_a_key + 1e-6


def test_backward_attention_takes_twice_the_forward():
    one = shape(widths=[8, 16])
    assert attention_per_token(one, 64) == 3 * attention_per_token(one, 64, passes=1)


def test_model_flops_exclude_padding_and_recomputation():
    one = shape(adapters=10, widths=[8])
    layers = linear_per_token(one) + attention_per_token(one, 40)
    assert model_flops(one, 500, 200, 40) == 500 * layers + 200 * head_per_token(one)


def test_hardware_flops_count_recomputation_once():
    one = shape(adapters=10, widths=[8])
    plain, again = (hardware_flops(one, 100, 30, 40, recompute, head_recompute=False) for recompute in (False, True))
    assert plain == 100 * (linear_per_token(one) + attention_per_token(one, 40)) + 30 * head_per_token(one)
    assert again - plain == 100 * (linear_recompute_per_token(one) + attention_per_token(one, 40, passes=1))


def test_a_chunked_loss_recomputes_the_logits():
    one = shape(head_trained=100, adapters=10, widths=[8])
    plain, again = (hardware_flops(one, 100, 30, 40, False, head_recompute=chunked) for chunked in (False, True))
    assert again - plain == 30 * 2 * 100


def test_a_dense_model_agrees_with_the_palm_formula():
    """PaLM, appendix B: 6 N + 12 L H Q T for a square; a causal product computes half of it."""
    layers, heads, head_dim, length, weights, head = 32, 16, 64, 2048, 10**9, 10**8
    one = shape(weights - head, weights - head, head, head, widths=[heads * head_dim] * layers)
    assert model_flops(one, 1, 1, length) == pytest.approx(6 * weights + 12 * layers * heads * head_dim * length / 2)
