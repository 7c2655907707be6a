"""Optimizations for images are applied and, where promised, learn the same as the plain run in float32."""

from __future__ import annotations

import json
from multiprocessing import active_children
from typing import Any

import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from conftest import spec_of
from ftbench.errors import MissingError, NotAppliedError
from ftbench.facts import architectures
from ftbench.families import describe
from ftbench.spec.load import load
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.worker import optimizations, trainer
from ftbench.worker.data import images
from ftbench.worker.data.collate import Collator
from ftbench.worker.model import loading
from ftbench.worker.model.parts import decoder_layers, vision_layers
from ftbench.worker.optimizations import compile as compile_layers
from ftbench.worker.optimizations import liger
from ftbench.worker.train import prepared

LLAVA, QWEN25, QWEN3 = "tiny/llava-next", "tiny/qwen2.5-vl", "tiny/qwen3-vl"
# Settings that only Qwen3-VL has, in addition to the shared ones.
MODELS = [LLAVA, pytest.param(QWEN25, marks=pytest.mark.exhaustive), QWEN3]
MADE = {
    "name": "images", "samples": 8, "image_size": [120, 90], "image_sizes": "photographs", "mean_length": 20,
    "max_length": 512,
}  # fmt: skip
TRAIN = {"max_steps": 4, "optimizer": "sgd", "learning_rate": 0.5, "max_grad_norm": 0}
METHOD = {"vision": "lora", "projector": "full"}


def rows_of(train_here, model, dataset=MADE, **sections):
    run = train_here(**{"model": {"id": model}, "dataset": dataset, "train": TRAIN, "method": METHOD} | sections)
    return read_steps(run.steps)[0]


def figures(rows):
    return [(row.loss, row.grad_norm) for row in rows]


PLAIN: dict[str, list[Any]] = {}  # steps of each model's plain run, trained once
FIXED = {"fixed_shape": True, "image_cache": True, "chunked_loss": True}
FREE = {"gradient_checkpointing": True, "fused_lora": True, "padding_free": True}


@pytest.mark.parametrize(("model", "optimization"), [
    *[(model, optimization) for model in (LLAVA, QWEN3) for optimization in (FIXED, FREE)],
    *[pytest.param(model, {name: True}, marks=pytest.mark.exhaustive)
      for model in (LLAVA, QWEN25, QWEN3) for name in (*FIXED, *FREE)],
], ids=lambda value: value if isinstance(value, str) else "+".join(value))  # fmt: skip
def test_losses_and_gradients_are_those_of_the_plain_run(train_here, model, optimization):
    plain = PLAIN[model] = PLAIN.get(model) or rows_of(train_here, model)
    other = rows_of(train_here, model, optimizations=optimization)
    assert [row.image_tokens for row in other] == [row.image_tokens for row in plain]
    for one, two in zip(figures(plain), figures(other), strict=True):
        assert two == pytest.approx(one, rel=2e-4)
    assert abs(plain[-1].loss - plain[0].loss) > 1e-3


def test_a_layer_that_nobody_reads_needs_no_step_in_the_backward_pass(train_here):
    """LLaVA reads the output of the encoder's second to last layer."""
    plain, within = (
        rows_of(train_here, LLAVA, method={"name": "full"}, optimizations={"optimizer_in_backward": on})
        for on in (False, True)
    )
    assert figures(within) == pytest.approx(figures(plain))


@pytest.mark.parametrize("model", MODELS)
def test_samples_that_share_a_row_are_trained_on_as_if_each_had_its_own(train_here, model):
    """Two rows of two samples against four rows. The images differ, so that attention across samples would show."""
    size = {"samples": 8, "image_size": [60, 40], "image_sizes": "fixed", "images_per_sample": 2}
    train = TRAIN | {"max_steps": 2}
    alone = rows_of(
        train_here, model, MADE | size | {"mean_length": None, "length": 12}, train=train | {"batch_size": 4}
    )
    length = alone[0].longest_sequence
    data = MADE | size | {"mean_length": None, "length": 12, "max_length": 2 * length + 3}
    for fixed in (False, True):
        rows = rows_of(train_here, model, data, train=train, optimizations={"packing": True, "fixed_shape": fixed})
        assert [row.samples for row in rows] == [4, 4]
        assert {row.padded_tokens for row in rows} == {4 * length}
        for one, two in zip(figures(alone), figures(rows), strict=True):
            assert two == pytest.approx(one, rel=2e-4)


@pytest.mark.parametrize(
    "model", [*[pytest.param(each, marks=pytest.mark.exhaustive) for each in (LLAVA, QWEN25)], QWEN3]
)
def test_rows_of_one_sample_each_are_filled_up_to_equal_lengths(train_here, cache, model):
    """Also the row that the last batch lacks; each as long as the others is what attention computes at once."""
    size = {"samples": 3, "image_size": [240, 180], "image_sizes": "fixed", "images_per_sample": 2, "mean_length": 10}
    train = TRAIN | {"max_steps": 2}
    plain = rows_of(train_here, model, MADE | size, train=train)
    longest = max(row.longest_sequence for row in plain)
    sections = {
        "train": train,
        "dataset": MADE | size | {"max_length": longest},
        "optimizations": {"packing": True, "fixed_shape": True},
    }
    rows = rows_of(train_here, model, **sections)
    assert [row.samples for row in rows] == [2, 1]
    assert {row.padded_tokens for row in rows} == {2 * longest}
    for one, two in zip(figures(plain), figures(rows), strict=True):
        assert two == pytest.approx(one, rel=2e-4)


def test_attention_is_told_of_rows_of_one_sample_as_equal_samples(cache):
    """Then they are computed as a batch of rows (optimizations/attention.py)."""
    on = {"packing": True, "fixed_shape": True, "attention": "varlen"}
    spec = spec_of(model={"id": LLAVA}, dataset=MADE, optimizations=on, train={"precision": "bf16", "batch_size": 4})
    made = Collator(spec, 0, 20, None)
    rows = [{"input_ids": [1] * length, "labels": [1] * length, "lengths": [length]} for length in (20, 7, 13)]
    for batch in (made(rows), made([*rows, rows[0]])):
        assert batch["cu_seq_lens_q"].tolist() == [0, 20, 40, 60, 80]
        assert batch["max_length_q"] == 20
        assert batch["position_ids"].tolist() == [[*range(20)] * 4]
        assert (batch["labels"] != -100).sum() == batch["count"].labels


def test_the_recipe_learns_what_the_plain_run_learns(train_here, tmp_path, compiler):
    """Use the CPU's attention."""
    (tmp_path / "spec.yaml").write_text(f"model: {LLAVA}\ndataset: {json.dumps(MADE)}\n")
    on = load(tmp_path / "spec.yaml", ["recipe=fastest-vision"]).optimizations.model_dump() | {"attention": "auto"}
    size = {"samples": 9, "image_size": [240, 180], "image_sizes": "fixed", "images_per_sample": 2, "mean_length": 10}
    plain = rows_of(train_here, LLAVA, MADE | size | {"max_length": 90}, method={})
    rows = rows_of(train_here, LLAVA, MADE | size | {"max_length": 90}, method={}, optimizations=on)
    for one, two in zip(figures(plain), figures(rows), strict=True):
        assert two == pytest.approx(one, rel=2e-4)
    assert [row.recompiles for row in rows][1:] == [0, 0, 0]


@pytest.mark.parametrize("model", MODELS)
def test_products_in_8_bits_reach_every_part_and_learn_what_the_plain_run_learns(train_here, model):
    """All linear layers but the head and adapters, whatever the number of tokens or patches."""
    sections = {"model": {"id": model}, "dataset": MADE, "train": TRAIN | {"precision": "bf16", "max_steps": 2}}
    plain, small = (train_here(**sections, optimizations={"fp8": value}) for value in ("off", "tensorwise"))
    kinds = [read_json(run.applied)["model"]["modules"] for run in (plain, small)]
    adapters = 2 * 7 * len(describe(architectures()[model]).layers)
    assert kinds[1]["Fp8Linear"] == kinds[0]["Linear"] - adapters - 1
    for one, two in zip(read_steps(plain.steps)[0], read_steps(small.steps)[0], strict=True):
        assert two.loss == pytest.approx(one.loss, rel=0.01)


@pytest.mark.parametrize("model", [QWEN25, QWEN3])
def test_positions_of_samples_end_to_end_are_those_that_the_model_gives_each_alone(cache, model):
    spec = spec_of(model={"id": model}, dataset=MADE | {"images_per_sample": 2}, optimizations={"packing": True})
    source = loading.source_of(spec.model)
    _, data = prepared(spec, source)
    inner = loading.load_model(spec, source).model
    samples = [sample for row in data.train for sample in row]
    pictures = [picture for sample in samples for picture in sample.pictures]
    rows = [{"input_ids": sample.ids, "labels": sample.labels, "lengths": [len(sample.ids)],
             "shown": [2 * index, 2 * index + 1]} for index, sample in enumerate(samples)]  # fmt: skip
    batch = Collator(spec, 0, data.longest, None, data.pixels, pictures)(rows)
    places = batch["position_ids"].split([len(sample.ids) for sample in samples], 2)
    for sample, (first, *turned), grid in zip(samples, places, batch["image_grid_thw"].split(2), strict=True):
        ids = torch.tensor([sample.ids])
        marks = (ids == data.pixels.token).long()
        expected, _ = inner.get_rope_index(ids, image_grid_thw=grid, mm_token_type_ids=marks)
        assert torch.equal(torch.stack(turned), expected)
        assert first.tolist() == [[*range(len(sample.ids))]]


@pytest.mark.parametrize("model", [pytest.param(QWEN25, marks=pytest.mark.exhaustive), QWEN3])
def test_text_alone_that_shares_a_row_is_kept_apart_too(train_here, model, monkeypatch):
    """With Liger's loss, transformers computes the loss: unlike trl, it does not turn off the cache."""
    monkeypatch.setattr(liger, "apply", lambda *_: None)  # its kernels need a GPU
    monkeypatch.setattr(liger, "verify", lambda *_: [])
    data = {"name": "synthetic", "samples": 8, "mean_length": None, "length": 16, "max_length": 64}
    plain = rows_of(train_here, model, data, train=TRAIN | {"batch_size": 4, "max_steps": 2}, method={})
    for on_liger in (False, True):
        packed = rows_of(train_here, model, data, train=TRAIN | {"batch_size": 1, "max_steps": 2}, method={},
                         optimizations={"packing": True, "liger": on_liger})  # fmt: skip
        for one, two in zip(figures(plain), figures(packed), strict=True):
            assert two == pytest.approx(one, rel=2e-4)


@pytest.mark.parametrize(("model", "fixed"), [
    (QWEN3, False), *[pytest.param(*case, marks=pytest.mark.exhaustive)
                      for case in ((LLAVA, False), (LLAVA, True), (QWEN25, False))],
])  # fmt: skip
def test_compiled_layers_of_both_parts_learn_the_same_from_images_of_many_sizes(train_here, compiler, model, fixed):
    train, choice = TRAIN | {"max_steps": 6}, {"compile": True, "fixed_shape": fixed}
    plain = rows_of(train_here, model, MADE | {"samples": 12}, train=train)
    compiled = rows_of(train_here, model, MADE | {"samples": 12}, train=train, optimizations=choice)
    assert len({row.padded_tokens for row in plain}) > 3
    for one, two in zip(figures(plain), figures(compiled), strict=True):
        assert two == pytest.approx(one, rel=2e-4)
    assert compiled[0].recompiles > 0
    assert sum(row.recompiles for row in compiled[1 if model == LLAVA else 3 :]) == 0
    assert bool(compiler["graph_break"]) == (model != LLAVA)  # Qwen's attention is left out on purpose


@pytest.mark.parametrize(("model", "any_length"), [(LLAVA, None), (QWEN3, True)])
def test_a_fixed_length_is_compiled_alone_but_for_qwen3_vl(cache, monkeypatch, model, any_length):
    """Whose gradients on an H200 were others then."""
    spec = spec_of(model={"id": model}, dataset=MADE, optimizations={"compile": True, "fixed_shape": True})
    loaded, asked = loading.load_model(spec, loading.source_of(spec.model)), []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, dynamic=None: asked.append((layer, dynamic)))
    compile_layers.apply(loaded, spec)
    layers = decoder_layers(loaded)
    assert [dynamic for layer, dynamic in asked if layer in layers] == [any_length] * len(layers)


@pytest.mark.parametrize(("read", "layers"), [(-2, 2), ([1, -2], 2), ([0, -1], 3), (None, 3)])
def test_clip_runs_only_layers_whose_outputs_the_model_reads(cache, monkeypatch, read, layers):
    spec = spec_of(model={"id": LLAVA}, dataset=MADE, optimizations={"compile": True})
    loaded, called = loading.load_model(spec, loading.source_of(spec.model)), []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, dynamic=None: None)
    if read is None:  # a model that has no such setting can read all outputs
        del loaded.config.vision_feature_layer
        monkeypatch.delattr(type(loaded.config), "vision_feature_layer")
    else:
        loaded.config.vision_feature_layer = read
    tower = loaded.base_model.vision_tower
    pixels = torch.randn(2, 3, *[tower.config.image_size] * 2)
    plain = tower(pixels, output_hidden_states=True)
    compile_layers.apply(loaded, spec)
    for layer in tower.encoder.layers:
        layer.register_forward_hook(lambda *_: called.append(1))
    ours = tower(pixels, output_hidden_states=True)
    assert len(called) == layers
    assert len(plain.hidden_states) == len(ours.hidden_states) == 4
    torch.testing.assert_close(ours.hidden_states[: layers + 1], plain.hidden_states[: layers + 1])
    last = ours.hidden_states[-1], ours.last_hidden_state
    assert last == (None, None) if layers == 2 else torch.equal(*last)


@pytest.mark.parametrize("model", MODELS)
def test_layers_that_read_images_are_compiled_too(cache, compiler, model):
    spec = spec_of(model={"id": model}, dataset=MADE, optimizations={"compile": True})
    loaded = loading.load_model(spec, loading.source_of(spec.model))
    layers = vision_layers(loaded)
    assert len(layers) == describe(architectures()[model]).vision.layers
    optimizations.apply(loaded, spec)
    layers[1]._compiled_call_impl = None
    told = next(sentence for sentence in optimizations.verify(loaded, spec) if "compile" in sentence)
    assert f"1 {type(layers[1]).__name__} were not compiled" in told


@pytest.mark.parametrize("model", MODELS)
def test_image_size_is_a_run_on_images_that_were_scaled_before(train_here, tmp_path, model):
    """And for LLaVA-NeXT tiles of no larger size: resolution and padding are two things."""
    shape = describe(architectures()[model]).vision
    large, train = MADE | {"image_size": [400, 300], "image_sizes": "fixed"}, TRAIN | {"max_steps": 1}
    rows = rows_of(train_here, model, large, train=train, optimizations={"image_size": 60})
    whole = rows_of(train_here, model, large, train=train)
    assert rows[0].padded_tokens >= rows[0].real_tokens
    if model == LLAVA:
        assert rows[0].tiles == whole[0].tiles
        small = large | {"image_size": [60, 45]}
        cut = rows_of(train_here, model, small, train=train, optimizations={"image_size": 28})
        assert cut[0].tiles == 2 * cut[0].images < whole[0].tiles
        assert cut[0].image_tokens < whole[0].image_tokens
    else:
        assert rows[0].image_tokens == 2 * shape.size(45, 60).tokens < whole[0].image_tokens


def test_a_scaled_image_is_the_image_that_a_user_would_have_scaled(cache):
    spec = spec_of(model={"id": QWEN25}, dataset=MADE, optimizations={"image_size": 60})
    _, data = prepared(spec, loading.source_of(spec.model))
    picture = data.train[0][0].pictures[0]
    height, width = data.pixels.side(picture)
    assert max(height, width) == 60
    by_hand = picture.open().resize((width, height), Image.Resampling.BICUBIC)
    made = data.pixels._processor(images=[by_hand], return_tensors="np")["pixel_values"]
    assert (data.pixels.process(picture) == made).all()


def test_the_model_must_know_the_tiles(cache):
    spec = spec_of(model={"id": LLAVA}, dataset=MADE, optimizations={"image_size": 28})
    model = loading.load_model(spec, loading.source_of(spec.model))
    assert any("the model's tiles are" in sentence for sentence in optimizations.verify(model, spec))
    optimizations.apply(model, spec)
    assert not any("tiles" in sentence for sentence in optimizations.verify(model, spec))


def test_a_fixed_shape_is_one_shape_for_images_of_many_sizes(cache):
    spec = spec_of(model={"id": LLAVA}, dataset=MADE | {"image_size": [50, 40]}, optimizations={"fixed_shape": True})
    _, data = prepared(spec, loading.source_of(spec.model))
    pictures = [picture for row in data.train for picture in row[0].pictures]
    collator = Collator(spec, 0, data.longest, 1, data.pixels, pictures)
    shapes = set()
    for index, (sample,) in enumerate(data.train):
        row = {"input_ids": sample.ids, "labels": sample.labels, "lengths": [len(sample.ids)], "shown": [index]}
        batch = collator([row, row])
        shapes.add((batch["input_ids"].shape, batch["pixel_values"].shape))
    assert len({data.pixels.size(picture) for picture in pictures}) > 1
    assert len(shapes) == 1


def test_images_are_processed_once_for_all_runs_that_process_them_alike(train_here, cache, monkeypatch):
    few, on = MADE | {"samples": 2}, {"optimizations": {"image_cache": True}, "train": TRAIN | {"max_steps": 1}}
    rows_of(train_here, QWEN3, few, **on)
    kept = {file: file.stat().st_mtime_ns for file in (cache / "images").iterdir()}
    assert len(kept) >= 2
    monkeypatch.setattr(images.Pixels, "process", lambda *_: pytest.fail("an image was processed again"))
    rows_of(train_here, QWEN3, few, **on)
    monkeypatch.undo()
    rows_of(train_here, QWEN3, few, **on | {"optimizations": {"image_cache": True, "image_size": 40}})
    files = set((cache / "images").iterdir())
    assert len(files) == len(kept) + 2
    assert all(file.stat().st_mtime_ns == written for file, written in kept.items())


def test_a_disk_without_room_is_a_sentence(train_here, cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(images.np, "save", full)
    with pytest.raises(MissingError, match="No space left on device; free some space, or set FTBENCH_CACHE"):
        rows_of(train_here, QWEN3, MADE | {"seed": 99, "samples": 2}, optimizations={"image_cache": True})


@pytest.mark.parametrize("name", ["image_size", "image_cache"])
def test_text_has_no_images_to_make_cheaper(name):
    with pytest.raises(ValidationError, match=rf"optimizations\.{name} .*synthetic has none: set it to off"):
        spec_of(optimizations={name: 336 if name == "image_size" else True})


@pytest.mark.parametrize(
    ("name", "value"),
    [("image_size", True), ("image_size", 8), ("loader_processes", 0), ("loader_processes", 65)],
)
def test_sizes_and_processes_are_numbers_within_bounds(name, value):
    with pytest.raises(ValidationError, match=rf"optimizations\.{name}"):
        spec_of(model={"id": QWEN3}, dataset=MADE, optimizations={name: value})


def test_the_loss_over_chunks_is_known_under_autocast(train_here):
    """Of full training, where no adapters lie between the model and what computes it in 16 bits."""
    rows = rows_of(train_here, LLAVA, method={"name": "full"}, optimizations={"chunked_loss": True},
                   train={"max_steps": 1, "precision": "bf16"})  # fmt: skip
    assert rows[0].loss > 0


@pytest.mark.parametrize("model", [pytest.param(LLAVA, marks=pytest.mark.exhaustive), QWEN3])
def test_processes_beside_the_training_make_the_same_batches_and_are_gone_after_it(train_here, model):
    sections = {"dataset": MADE | {"eval_samples": 3}, "measure": {"eval": "epoch"},
                "train": TRAIN | {"gradient_accumulation_steps": 2, "max_steps": 3}}  # fmt: skip
    plain, other = (
        train_here(model={"id": model}, method=METHOD, optimizations=optimizations, **sections)
        for optimizations in ({}, {"loader_processes": 2})
    )
    assert active_children() == []
    for one, two in zip(read_steps(plain.steps)[0], read_steps(other.steps)[0], strict=True):
        assert two.loss == pytest.approx(one.loss, rel=1e-6)
        assert two.grad_norm == one.grad_norm is None or two.grad_norm == pytest.approx(one.grad_norm, rel=1e-6)
        counted = ("real_tokens", "label_tokens", "samples", "images", "tiles", "image_patches", "image_tokens")
        assert [getattr(two, name) for name in counted] == [getattr(one, name) for name in counted]
        assert two.images
        assert (two.data_time_s is None) == (two.phase == "evaluate")
    assert orders_of(plain) == orders_of(other)


def orders_of(run):
    return read_json(run.applied)["dataset"]["order_hash"]


def test_batches_that_no_other_process_makes_are_not_taken_for_it(train_here, monkeypatch):
    monkeypatch.setattr(trainer.Trainer, "loaders", lambda self: [])
    with pytest.raises(NotAppliedError, match="loader_processes is 4, but it trains with 0"):
        rows_of(train_here, QWEN3, optimizations={"loader_processes": True}, train={"max_steps": 1})
