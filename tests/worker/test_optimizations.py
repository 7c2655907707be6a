"""Each optimization computes the same in another way. On the CPU with a tiny model; tests/gpu covers GPUs."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import sys
import types
import weakref
from collections import Counter, defaultdict
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from conftest import spec_of, train_in
from ftbench.core.units import GIB
from ftbench.errors import SpecError
from ftbench.estimate.memory import ends
from ftbench.estimate.memory.estimate import estimate_memory
from ftbench.estimate.workload.plan import TrainingPlan
from ftbench.kernels.host_offload import HostTensors, Kept
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.incompatibilities import machine_incompatibilities
from ftbench.store.rundir import read_json, write_json
from ftbench.store.steps import read_steps
from ftbench.worker.data import collate, prepare
from ftbench.worker.data.collate import Collator
from ftbench.worker.data.tokens import IGNORE, Tokens
from ftbench.worker.model.random_weights import materialise
from ftbench.worker.optimizations import attention, chunked_loss, compile, liger, packing

BF16 = torch.finfo(torch.bfloat16).eps


def sample(length: int, seed: int) -> Tokens:
    ids = np.random.default_rng(seed).integers(4, 500, length).tolist()
    return Tokens(ids, [IGNORE] * (length // 3) + ids[length // 3 :], length)


def row(*samples: Tokens) -> dict:
    return {
        "input_ids": [token for each in samples for token in each.ids],
        "labels": [label for each in samples for label in each.labels],
        "lengths": [len(each.ids) for each in samples],
    }


def collator(**optimizations) -> Collator:
    return Collator(spec_of(optimizations=optimizations), 0, 64, 8)


def losses(run) -> list[float]:
    return [step.loss for step in read_steps(run.steps)[0] if step.phase == "train"]


def steps(run) -> list:
    return [step for step in read_steps(run.steps)[0] if step.phase == "train"]


@pytest.fixture(scope="module")
def model(cache):
    folder = materialise(spec_of().model)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(params=["sdpa", "eager", "flex_attention",
                        pytest.param("flex_attention, compiled", marks=pytest.mark.exhaustive)])  # fmt: skip
def attending(request, model):
    """The model with this attention; flex_attention as its own eager code has it, or compiled, which takes long."""
    attention, _, compiled = request.param.partition(", ")
    model.set_attn_implementation(attention)
    with torch.compiler.set_stance("default" if compiled else "force_eager"):
        yield model
    model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("name", ["packing", "padding_free"])
def test_packed_samples_do_not_see_each_other(attending, name):
    model = attending
    alone, before, after = sample(17, 1), sample(9, 2), sample(23, 3)
    batch = collator(**{name: True})([row(before, alone, after)])
    del batch["labels"], batch["count"]
    with torch.no_grad():
        together = model(**batch, use_cache=False).logits[0, 9:26]
        by_itself = model(input_ids=torch.tensor([alone.ids])).logits[0]
    torch.testing.assert_close(together, by_itself, atol=2e-5, rtol=1e-4)
    with torch.no_grad():  # and it would show if it did
        batch.pop("position_ids")
        assert not torch.allclose(model(**batch, use_cache=False).logits[0, 9:26], by_itself, atol=1e-3)


def test_packed_samples_do_not_see_each_other_in_gpt_oss(cache):
    """transformers makes its masks without the positions."""
    spec = spec_of(model={"id": "tiny/gpt-oss"}, optimizations={"packing": True})
    model = AutoModelForCausalLM.from_pretrained(materialise(spec.model), dtype=torch.float32).eval()
    alone, before = sample(47, 1), sample(9, 2)
    batch = collator(packing=True)([row(before, alone)])
    del batch["labels"], batch["count"]
    with torch.no_grad():
        by_itself = model(input_ids=torch.tensor([alone.ids])).logits[0]
        assert not torch.allclose(model(**batch, use_cache=False).logits[0, 9:], by_itself, atol=1e-3)
        packing.apply(model, spec)
        torch.testing.assert_close(model(**batch, use_cache=False).logits[0, 9:], by_itself, atol=2e-5, rtol=1e-4)


def test_no_sample_predicts_the_first_token_of_the_next():
    first, second = sample(6, 1), Tokens([7, 8, 9], [7, 8, 9], 3)
    batch = collator(packing=True)([row(first, second)])
    assert batch["labels"][0].tolist() == [IGNORE, *first.labels[1:], IGNORE, 8, 9]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert "attention_mask" not in batch


@pytest.mark.parametrize(("few", "packed"), [(False, False), (True, True)])
def test_chunked_loss_with_a_fixed_shape_learns_the_same(train_here, monkeypatch, few, packed):
    """With SGD, two passes per step and selective checkpointing, and with a label on few or on all tokens."""
    skipped, skip = [], chunked_loss.skip_unread
    monkeypatch.setattr(chunked_loss, "skip_unread", lambda *given: skipped.append(skip(*given)) or skipped[-1])
    data = {"samples": 24, "eval_samples": 4, "mean_length": 30, "structure": "tasks" if few else "random"}
    train = {"max_steps": 3, "gradient_accumulation_steps": 2, "optimizer": "sgd", "learning_rate": 0.5,
             "max_grad_norm": 0}  # fmt: skip
    on = {"packing": packed, "gradient_checkpointing": "selective"}
    plain, ours = (
        train_here(dataset=data, train=train, optimizations=on | more)
        for more in ({}, {"chunked_loss": True, "fixed_shape": True})
    )
    assert skipped == [True] * few
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-5)
    assert [row.grad_norm for row in steps(ours)] == pytest.approx([row.grad_norm for row in steps(plain)], rel=1e-4)
    evals = [read_steps(run.steps)[0][-1] for run in (plain, ours)]
    assert evals[0].phase == "evaluate"
    assert evals[1].loss == pytest.approx(evals[0].loss, rel=1e-5)


def varlen_spec(**optimizations) -> Experiment:
    values = spec_of(optimizations={"packing": True, **optimizations}).model_dump()
    values["optimizations"] |= {"attention": "varlen"}
    values["train"] |= {"precision": "bf16"}
    return Experiment.model_validate(values)


def varlen_collator(**optimizations) -> Collator:
    return Collator(varlen_spec(**optimizations), 0, 64, 8)


def test_the_last_batch_of_a_fixed_shape_is_as_wide_as_the_others():
    spec = spec_of(optimizations={"packing": True, "fixed_shape": True}, train={"batch_size": 2})
    made = Collator(spec, 0, 64, 8)
    batches = [made(rows) for rows in ([row(sample(64, 1)), row(sample(50, 2))], [row(sample(3, 3))])]
    assert {batch["input_ids"].shape for batch in batches} == {(1, 128)}
    assert (batches[0]["labels"][0, 114:] == IGNORE).all()
    assert batches[0]["position_ids"][0, 114:].tolist() == list(range(14))
    counts = [batch["count"] for batch in batches]
    assert [(count.real, count.padded, count.samples) for count in counts] == [(114, 128, 2), (3, 128, 1)]


def test_padded_rows_of_a_fixed_shape_are_as_many_in_the_last_batch(model):
    made = Collator(spec_of(optimizations={"fixed_shape": True}, train={"batch_size": 2}), 0, 64, 8)
    whole, last = made([row(sample(64, 1)), row(sample(50, 2))]), made([row(sample(30, 3))])
    assert whole["input_ids"].shape == last["input_ids"].shape == (2, 64)
    assert (last["labels"][1] == IGNORE).all()
    with torch.no_grad():
        del last["count"]
        loss = model(**last).loss
        alone = model(**{name: part[:1] for name, part in last.items()}).loss
    torch.testing.assert_close(loss, alone)


def test_batches_of_another_kind_are_reported():
    one, other = ((2, 64), True), ((2, 32), True)
    fixed, packed = (spec_of(optimizations={name: True}) for name in ("fixed_shape", "packing"))
    assert collate.verify(fixed, {one}) == collate.verify(packed, {((1, 64), False)}) == []
    assert collate.verify(fixed, {one, other}) == [
        "optimizations.fixed_shape is on and batches have shapes [(2, 32), (2, 64)]"
    ]
    assert collate.verify(packed, {one}) == ["optimizations.packing is on and batches have padding"]


def test_fixed_shape_has_equally_many_bounds_in_each_batch():
    made = varlen_collator(fixed_shape=True)
    for rows in ([[5, 4], [9]], [[20, 20, 20], [10, 10, 10]], [[3], [2]], [[64], [64]]):
        batch = made([row(*(sample(length, length) for length in lengths)) for lengths in rows])
        bounds = batch["cu_seq_lens_q"]
        assert bounds.shape == (8 + 1,)
        assert bounds[0] == 0
        assert bounds[-1] == 128
        assert (bounds.diff() >= 0).all()
        assert bounds.diff().max() <= batch["max_length_q"] == 64


def test_attention_works_on_no_more_tokens_than_the_longest_sample_has():
    spec = varlen_spec(fixed_shape=True)
    batch = Collator(spec, 0, 64, 8, sample=20)([row(sample(20, 1), sample(7, 2)), row(sample(15, 3))])
    lengths = [20, 7, 15, 20, 20, 20, 20, 6]  # the last five are padding
    assert batch["cu_seq_lens_q"].diff().tolist() == batch["cu_seq_lens_k"].diff().tolist() == lengths
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["max_length_q"] == batch["max_length_k"] == 20


def test_the_longest_sample_of_packed_rows_is_shorter_than_a_row():
    data = {"name": "synthetic", "samples": 40, "mean_length": None, "like": "japanese-alpaca", "max_length": 2048}
    made = prepare.prepare(spec_of(dataset=data, optimizations={"packing": True}), None, 256)
    rows = [[len(each.ids) for each in packed] for packed in made.train]
    longest, full = max(map(max, rows)), max(map(sum, rows))
    assert (made.longest_sample, made.longest) == (longest, full)
    assert longest < full
    assert made.most_parts(1) == max(len(lengths) + math.ceil((full - sum(lengths)) / longest) for lengths in rows)


@pytest.fixture
def by_boundaries(model):
    """The tiny model with `varlen` around a kernel for the CPU, as opaque to the compiler as torch's own."""

    @torch.library.custom_op("ftbench_test::varlen", mutates_args=())
    def segments(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        for begin, end in pairwise(bounds.tolist()):
            parts = [part[begin:end].transpose(0, 1)[None] for part in (query, key, value)]
            if end > begin:
                out[begin:end] = F.scaled_dot_product_attention(*parts, is_causal=True)[0].transpose(0, 1)
        return out

    segments.register_fake(lambda query, key, value, bounds: torch.empty_like(query))

    def kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, is_causal=False, scale=None):
        assert is_causal
        return segments(query, key, value, cu_seq_q)

    AttentionInterface.register("varlen_on_cpu", attention.attention(kernel))
    before = model.config._attn_implementation
    model.set_attn_implementation("varlen_on_cpu")
    yield model
    model.set_attn_implementation(before)


def test_varlen_attention_separates_samples(by_boundaries, monkeypatch):
    """Without a search of the positions, for which transformers would wait for the device."""
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: pytest.fail("looked for"))
    before, alone, after = sample(9, 2), sample(17, 1), sample(23, 3)
    results = []
    for rows in ([before, alone, after], [alone]):
        batch = varlen_collator()([row(*rows)])
        del batch["labels"], batch["count"]
        with torch.no_grad():
            results.append(by_boundaries(**batch, use_cache=False).logits[0])
    torch.testing.assert_close(results[0][9:26], results[1], atol=3 * BF16, rtol=3 * BF16)  # the kernel's inputs


def test_samples_of_equal_length_are_computed_as_rows(by_boundaries, monkeypatch):
    batch = varlen_collator()([row(sample(64, 1)), row(sample(64, 2)), row(sample(64, 3))])
    del batch["labels"], batch["count"]
    with torch.no_grad():
        apart = by_boundaries(**batch | {"max_length_q": 65}, use_cache=False).logits
        monkeypatch.setattr(torch.ops.ftbench_test, "varlen", None)  # is not called
        rows = by_boundaries(**batch, use_cache=False).logits
    torch.testing.assert_close(rows, apart, atol=3 * BF16, rtol=3 * BF16)  # the kernel's inputs


def test_a_window_shorter_than_the_rows_is_kept(by_boundaries):
    query = torch.randn(1, 2, 128, 8)
    bounds = torch.tensor([0, 64, 128], dtype=torch.int32)
    function = AttentionInterface()["varlen_on_cpu"]
    with pytest.raises(SpecError, match="sliding window"):  # this kernel has no window
        function(None, query, query, query, None, cu_seq_lens_q=bounds, max_length_q=64, sliding_window=32)
    function(None, query, query, query, None, cu_seq_lens_q=bounds, max_length_q=64, sliding_window=64)


def with_window(query, key, value, bounds, _, most, __, *, window_size, enable_gqa, scale):
    """A kernel like torch's newest, as plain attention."""
    token = torch.arange(len(query))
    sample, distance = torch.bucketize(token, bounds[1:].long(), right=True), token[:, None] - token
    left, right = (len(token) if side < 0 else side for side in window_size)
    seen = (sample[:, None] == sample) & (distance <= left) & (distance >= -right)
    parts = [part.transpose(0, 1)[None] for part in (query, key, value)]
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return F.scaled_dot_product_attention(*parts, attn_mask=seen, **options)[0].transpose(0, 1)


def without_window(*given, is_causal):
    """A kernel like torch's first one."""
    return with_window(*given, window_size=(-1, 0 if is_causal else -1), enable_gqa=False, scale=None)


@pytest.mark.parametrize(("kernel", "lengths", "window"), [
    (with_window, (9, 3, 12), None), (with_window, (9, 3, 12), 4), (with_window, (8, 8, 8), 4),
    (with_window, (8, 8, 8), None), (without_window, (9, 3, 12), None),
])  # fmt: skip
def test_varlen_attention_equals_transformers(kernel, lengths, window):
    """With fewer key heads, and a scale that is not the default."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 24, 8, dtype=torch.float64) for heads in (6, 2, 2))
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    given = {"scaling": 0.1, "cu_seq_lens_q": bounds, "max_length_q": max(lengths), "sliding_window": window}
    found, _ = attention.attention(kernel)(None, query, key, value, None, **given)
    inside = torch.block_diag(*(torch.ones(length, length) for length in lengths)).tril().triu(1 - (window or 24))
    layer = SimpleNamespace(num_key_value_groups=3)
    expected, _ = sdpa_attention_forward(layer, query, key, value, inside.bool(), scaling=0.1)
    torch.testing.assert_close(found, expected)


def test_a_fixed_shape_compiles_one_graph(by_boundaries):
    model, made = by_boundaries, varlen_collator(fixed_shape=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    for lengths in ([[17], [9, 23]], [[9, 20, 17], [64]], [[12, 12, 12, 12], [5, 6]]):
        batch = made([row(*(sample(length, length) for length in each)) for each in lengths])
        del batch["labels"], batch["count"]
        with torch.no_grad():
            model(**batch, use_cache=False)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for layer in model.model.layers:
        layer._compiled_call_impl = None
    torch._dynamo.reset()
    assert graphs == 1


@pytest.mark.parametrize(
    ("hits", "misses", "word"), [(0, 0, None), (0, 3, "cold"), (3, 0, "warm"), (2, 1, "partly warm")]
)
def test_cache_state_of_graphs_is_reported(monkeypatch, hits, misses, word):
    counters = defaultdict(Counter)
    counters["inductor"] |= Counter(fxgraph_cache_hit=hits, fxgraph_cache_miss=misses)
    monkeypatch.setattr(torch._dynamo.utils, "counters", counters)
    assert compile.cache() == word


@given(st.lists(st.integers(1, 64), min_size=1, max_size=200))
def test_packing_keeps_each_sample_once_and_within_a_row(lengths):
    made = [sample(length, seed) for seed, length in enumerate(lengths)]
    rows = prepare.packed(made, 64)
    assert sorted(id(each) for part in rows for each in part) == sorted(map(id, made))
    assert max(sum(len(each.ids) for each in part) for part in rows) <= 64
    two = sorted(sum(len(each.ids) for each in part) for part in rows)[:2]
    assert len(two) < 2 or sum(two) > 64  # otherwise they would share a row


def test_length_grouping_pads_less_and_keeps_all_samples():
    made = [sample(length, seed) for seed, length in enumerate(np.random.default_rng(1).integers(4, 64, 130))]
    grouped = prepare.grouped(made, 4, seed=3)
    assert sorted(map(id, grouped)) == sorted(map(id, made))
    assert [len(each.ids) for each in grouped] == [len(each.ids) for each in prepare.grouped(made, 4, seed=3)]

    def padding(samples):
        lengths = [len(each.ids) for each in samples]
        return sum(4 * max(lengths[at : at + 4]) - sum(lengths[at : at + 4]) for at in range(0, 128, 4))

    assert padding(grouped) < padding(made) / 3


@pytest.mark.parametrize(("autocast", "within"), [(False, 1e-5), (True, 3 * BF16)])
def test_chunked_loss_and_gradient_equal_plain(autocast, within):
    torch.manual_seed(0)
    hidden = torch.randn(3, 9, 16, requires_grad=True)
    head = torch.nn.Linear(16, 50)
    labels = torch.randint(0, 50, (3, 9))
    labels[:, :3] = IGNORE
    positions = torch.nonzero(labels.reshape(-1) != IGNORE).squeeze(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = chunked_loss.chunked_loss(hidden, labels, positions, head, size=5)
    (ours / 7).backward()
    found = [part.grad.clone() for part in (hidden, head.weight, head.bias)]
    hidden.grad, head.weight.grad, head.bias.grad = None, None, None
    plain = F.cross_entropy(
        head(hidden)[:, :-1].reshape(-1, 50), labels[:, 1:].reshape(-1), ignore_index=IGNORE, reduction="sum"
    )
    (plain / 7).backward()
    for mine, theirs in zip([ours, *found], [plain, hidden.grad, head.weight.grad, head.bias.grad], strict=True):
        assert (mine - theirs).norm() <= within * theirs.norm()
    with torch.no_grad():
        torch.testing.assert_close(chunked_loss.chunked_loss(hidden, labels, positions, head), plain)


def test_chunk_is_freed_before_the_next():
    """Its gradient is as large as its logits: 0.58 GiB of 2,048 tokens of Qwen3."""
    made = []

    def softmax(logits, *given):
        assert [tensor() for tensor in made] == [None] * len(made)
        gradient, of_targets = chunked_loss.probabilities(logits, *given)
        made.extend([weakref.ref(logits), weakref.ref(gradient)])
        return gradient, of_targets

    hidden, head = torch.randn(2, 8, 16, requires_grad=True), torch.nn.Linear(16, 50)
    chunked_loss.chunked_loss(hidden, torch.randint(0, 50, (2, 8)), torch.arange(1, 8), head, softmax, size=2)
    assert len(made) == 2 * 4


@pytest.mark.parametrize(("dtypes", "method", "size"), [
    ("16 bits", "lora", 64), ("16 bits", "full", 16), ("16 bits", "lora, weight_offload", 16),
    ("32 bits", "full, weight_offload", 256), ("32 bits", "lora", 16), ("32 bits, autocast", "full", 64),
    ("32 bits, autocast", "lora", 256), ("32 bits, autocast", "full, weight_offload", 16),
])  # fmt: skip
def test_estimate_counts_the_tensors_of_the_chunked_loss(dtypes, method, size):
    """`fetch` copies the head to the GPU, as weight_offload does."""
    dtype, autocast = torch.bfloat16 if dtypes == "16 bits" else torch.float32, dtypes != "32 bits"
    hidden, full = torch.randn(1, 256, 128, dtype=dtype, requires_grad=True), method.startswith("full")
    weight = torch.randn(4096, 128, dtype=dtype, requires_grad=full)
    if offloaded := method.endswith("weight_offload"):
        weight.fetch = weight.detach().clone
    (tracker := MemTracker()).track_external(hidden, weight)
    labels, positions, head = torch.randint(0, 4096, (1, 256)), torch.arange(6, 256), SimpleNamespace(weight=weight)
    head.bias = None
    with tracker:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = chunked_loss.chunked_loss(hidden * 1, labels, positions, head, size=size)
        loss.backward()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] - hidden.nbytes - weight.nbytes
    each, shape = dtype.itemsize, SimpleNamespace(vocab=4096, hidden=128)
    plan = TrainingPlan(full=full, weight=each, upcast=each, compute=2 if autocast else 4, autocast=autocast,
                        loss="chunked", chunk=size, streamed=offloaded)  # fmt: skip
    batch = SimpleNamespace(tokens=256, labels=250)
    estimated = ends.transient_peak(shape, plan, batch) + ends.fetched_head(shape, plan) + hidden.nbytes
    assert estimated == pytest.approx(peak, rel=0.015)


@pytest.mark.parametrize(("dtype", "tied", "vocab", "length", "phase"), [
    ("float32", False, 4096, 64, "loss"), ("bfloat16", True, 4096, 64, "loss"),
    ("bfloat16", True, 32768, 4, "backward, embedding"),
])  # fmt: skip
def test_estimate_counts_the_tensors_of_a_full_training(tmp_path, dtype, tied, vocab, length, phase):
    """Autocast copies the 32-bit weights of the layers, and keeps the copy of the head until the forward pass ends."""
    shape = {"model_type": "qwen3", "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2,
             "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 48, "vocab_size": vocab,
             "tie_word_embeddings": tied, "max_position_embeddings": 4096}  # fmt: skip
    write_json(tmp_path / "qwen3.json", shape)
    path = str(tmp_path / "qwen3.json")
    spec = resolve(Experiment.model_validate({
        "name": "x", "model": {"id": "small/qwen3", "weights": "random", "path": path, "dtype": dtype},
        "method": {"name": "full"}, "train": {"batch_size": 4}, "optimizations": {"chunked_loss": True},
        "dataset": {"name": "synthetic", "samples": 12, "length": length, "max_length": length},
    }), (9, 0))  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=getattr(torch, dtype))
    chunked_loss.apply(model, spec)
    optimizer, ids = torch.optim.AdamW(model.parameters(), foreach=True), torch.randint(0, vocab, (4, length))
    positions = torch.arange(4 * length).view(4, length)[:, 1:].flatten()
    (tracker := MemTracker()).track_external(model, optimizer)
    with tracker:
        for _ in range(2):
            tracker.reset_mod_stats()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, label_positions=positions).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    memory = estimate_memory(spec, 80.0)
    assert memory.peak_phase == phase
    assert (memory.allocated.expected - memory.parts["workspace"]) * GIB == pytest.approx(peak, rel=0.015)


def test_batch_without_labels_has_zero_loss_and_a_gradient():
    hidden = torch.randn(1, 4, 16, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.long)
    loss = chunked_loss.chunked_loss(
        hidden, torch.full((1, 4), IGNORE), nothing, torch.nn.Linear(16, 50).requires_grad_(False)
    )
    loss.backward()
    assert loss == 0
    assert not hidden.grad.any()


@pytest.fixture(scope="module")
def plain(tmp_path_factory, cache):
    """The run of the plain recipe, trained once, to hold the others against."""
    return train_in(tmp_path_factory.mktemp("plain"), dataset={"samples": 8})


SAME = {
    "chunked_loss of few tokens": {"chunked_loss": 16},
    "checkpoints in host memory": {"gradient_checkpointing": "offload"},
    "padding_free with the chunked loss": {"padding_free": True, "chunked_loss": True},
    "fixed_shape": {"fixed_shape": True},
    "checkpointing": {"gradient_checkpointing": True},
    "selective checkpointing": {"gradient_checkpointing": "selective"},
}


@pytest.mark.parametrize("name", SAME)
def test_an_optimization_learns_the_same(train_here, plain, name):
    run = train_here(dataset={"samples": 8}, optimizations=SAME[name])
    assert read_json(run.applied)["dataset"]["order_hash"] == read_json(plain.applied)["dataset"]["order_hash"]
    assert losses(run) == pytest.approx(losses(plain), rel=2e-4)
    assert len(losses(run)) == 4


def test_files_record_each_optimization(train_here):
    packed = train_here(
        optimizations={"packing": True, "chunked_loss": True}, dataset={"samples": 16, "max_length": 64}
    )
    assert all(step.padded_tokens == step.real_tokens for step in steps(packed))
    assert sum(step.samples for step in steps(packed)) == 16
    assert read_json(packed.applied)["loss"] == "fused over chunks (ftbench)"
    fixed = train_here(optimizations={"fixed_shape": True}, train={"max_steps": 3})
    assert len({step.padded_tokens for step in steps(fixed)}) == 1
    away = train_here(optimizations={"gradient_checkpointing": "offload"}, train={"max_steps": 1})
    width, layers = 64, read_json(away.applied)["model"]["layers"]
    first = steps(away)[0].padded_tokens * width * 4 / 2**30  # the layers' inputs are 32-bit on a CPU
    assert read_json(away.applied)["checkpoints_moved_gb"] == pytest.approx(layers * first)
    half, whole = (
        read_json(train_here(optimizations={"gradient_checkpointing": on}, train={"max_steps": 1}).applied)
        for on in ("selective", True)
    )
    assert (half["gradient_checkpointing"], whole["gradient_checkpointing"]) == (0.5, 1)


IMPOSSIBLE = [
    ({"packing": True, "padding_free": True}, "set padding_free to off"),
    ({"attention": "varlen"}, "set packing or padding_free"),
    ({"fixed_shape": True, "padding_free": True}, "choose one"),
    ({"length_grouping": True, "packing": True}, "length_grouping"),
    ({"activation_offload": True, "gradient_checkpointing": True}, "choose one"),
    ({"gradient_checkpointing": "some"}, "'selective' or 'offload'"),
    ({"chunked_loss": 3}, "greater than or equal to 16"),
    ({"chunked_loss": "big"}, "valid integer"),
    ({"compile": "sometimes"}, "'dynamic' or 'lean'"),
]


@pytest.mark.parametrize(("optimizations", "said"), IMPOSSIBLE)
def test_incompatible_optimizations_are_errors_with_a_fix(optimizations, said):
    with pytest.raises(ValueError, match=said):
        spec_of(optimizations=optimizations)


def test_offloaded_checkpoints_need_a_gpu():
    (told,) = machine_incompatibilities(spec_of(optimizations={"gradient_checkpointing": "offload"}), None)
    assert told.endswith("offload needs a GPU: set it to off")


def test_offloaded_layer_keeps_nothing_on_the_device(model):
    ids = torch.tensor([sample(24, 5).ids])
    gradients, kept = [], []
    for memory in (None, HostTensors()):
        copied = copy.deepcopy(model).train()
        copied.set_attn_implementation("sdpa")
        copied.gradient_checkpointing_enable({"use_reentrant": False})
        if memory is not None:
            for layer in copied.model.layers:
                layer._gradient_checkpointing_func = memory.around(layer._gradient_checkpointing_func)
        held: list[torch.Tensor] = []

        def hold(tensor, held=held):
            held.append(tensor)
            return tensor

        for _ in range(2):  # a second pass finds nothing left of the first
            with saved_tensors_hooks(hold, lambda tensor: tensor):
                copied(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in copied.parameters()])
        kept.append(len(held))
    layers = len(model.model.layers)
    assert (memory.moved, memory.fetched) == (2 * layers, 2 * layers)
    assert kept[0] - kept[1] == 2 * layers  # saved inside the layers, invisible to the outer hooks
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


class Stream:
    """Stands for the streams of a GPU. It refuses other devices, as torch does."""

    def __init__(self, device):
        assert device.type == "cuda", f"Expected a cuda device, but got: {device}"

    def record_event(self):
        return object()

    def wait_event(self, event):
        assert event is not None

    wait_stream = wait_event


def test_tensors_on_the_cpu_do_not_delay_the_copies_to_the_gpu(monkeypatch):
    """In torch 2.11, checkpointing also saves an empty tensor on the CPU for each layer."""
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "copy_", lambda tensor, *_, **__: tensor)
    with FakeTensorMode():
        memory = HostTensors()
        saved = [(torch.empty(0), torch.empty(1 << 20, device="cuda")) for _ in range(4)]
        kept = [[memory._pack(tensor) for tensor in each] for each in saved]
        for number in (3, 2, 1, 0):
            found = [memory._unpack(each) for each in kept[number]]
            assert [each.device.type for each in found] == ["cpu", "cuda"]
            begun = [inputs.fetched is not None for _, inputs in kept]
            assert begun == [each == number - 1 for each in range(4)]


def test_copies_that_nothing_reads_and_failed_calls_do_not_keep_or_overwrite_memory(monkeypatch):
    waited: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(wait_event=waited.append))
    memory, kept = HostTensors(), Kept(torch.ones(1), torch.device("cpu"), None)
    kept.fetched = "copy to the device"
    del kept
    assert waited == ["copy to the device"]

    def fail():
        memory._leaving.append((torch.ones(1), "copy to the host"))
        raise RuntimeError

    with pytest.raises(RuntimeError):
        memory.around(fail)()
    assert (waited[1:], memory._leaving) == (["copy to the host"], [])


def test_model_without_a_fused_loss_in_liger_is_an_error_with_a_fix(monkeypatch):
    def refuse(**_):  # as Liger 0.8 does for Granite
        raise NotImplementedError("LigerFusedLinearCrossEntropy is not available for Granite models.")

    library = types.SimpleNamespace(_apply_liger_kernel_to_instance=refuse)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", library)
    with pytest.raises(SpecError, match="Granite models: set it to off"):
        liger.apply(torch.nn.Module(), spec_of())


@pytest.mark.parametrize("name", ["liger", "activation_offload"])
def test_optimizations_that_need_a_gpu_are_errors_without_one(name):
    (told,) = machine_incompatibilities(spec_of(optimizations={name: True}), None)
    assert told == f"optimizations.{name} needs a GPU: set it to off"


@pytest.mark.parametrize(
    "optimizations",
    [{"fp8": "tensorwise", "compile": True}, {"chunked_loss": True}, {"liger": True}, {"compile": True}],
    ids=json.dumps,
)
def test_unsloth_excludes_optimizations_that_it_replaces(optimizations):
    with pytest.raises(ValueError, match="with method unsloth"):
        spec_of(method={"name": "unsloth"}, optimizations=optimizations)


def test_the_longest_samples_come_first_and_the_others_keep_their_order():
    made = [sample(length, seed) for seed, length in enumerate([5, 30, 7, 40, 9, 8])]
    found = [len(each.ids) for each in prepare.longest_first(made, 2)]
    assert found == [40, 30, 5, 7, 9, 8]
    assert all(a >= b for a, b in pairwise(found[:2]))
