"""Images, tiles and their tokens are counted separately, and FLOPs include encoder and projector."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from conftest import spec_of, train_in
from ftbench.core import flops
from ftbench.core.rows import StepRow
from ftbench.facts import architectures
from ftbench.families import describe
from ftbench.store.rundir import RunDir, read_json
from ftbench.store.steps import read_steps
from ftbench.store.summary import summarise
from ftbench.worker import methods
from ftbench.worker.measure import effective_config
from ftbench.worker.model import loading

LLAVA, QWEN25, QWEN3 = "tiny/llava-next", "tiny/qwen2.5-vl", "tiny/qwen3-vl"
MODELS = [LLAVA, pytest.param(QWEN25, marks=pytest.mark.exhaustive), QWEN3]
MADE = {"name": "images", "samples": 12, "image_size": [300, 200], "mean_length": 20, "max_length": 1024}


@pytest.fixture(scope="module", params=MODELS)
def trained(request, tmp_path_factory, cache):
    """A model, and its run of four steps of two samples with two images each, and an evaluation of one sample."""
    train = {"max_steps": 4, "gradient_accumulation_steps": 2, "batch_size": 1}
    data = MADE | {"samples": 8, "images_per_sample": 2, "eval_samples": 1}
    folder = tmp_path_factory.mktemp("trained")
    return request.param, train_in(folder, model={"id": request.param}, dataset=data, train=train,
                                   measure={"warmup": 1}, optimizations={"gradient_checkpointing": True})  # fmt: skip


def rows_of(run, phase="train"):
    return [row for row in read_steps(run.steps)[0] if row.phase == phase]


def test_images_and_their_tokens_are_counted_separately(trained):
    model, run = trained
    size = describe(architectures()[model]).vision.size(200, 300)
    for row in rows_of(run):
        assert (row.images, row.tiles) == (4, 4 * size.tiles)
        assert row.image_tokens == 4 * size.tokens
        assert row.image_patches == 4 * size.patches
        assert row.image_tokens + row.text_tokens == row.real_tokens
        assert 0 < row.label_tokens < row.text_tokens
    summary = summarise(run)
    steps = summary.samples_per_s / 2
    assert summary.images_per_s == pytest.approx({"images": 4 * steps, "tiles": 4 * size.tiles * steps})
    assert summary.tokens_per_s["image"] == pytest.approx(4 * size.tokens * steps)
    assert summary.tokens_per_s["image"] + summary.tokens_per_s["text"] == pytest.approx(summary.tokens_per_s["real"])
    assert summary.dataset["images"]["count"] == 16
    assert summary.dataset["images"]["tokens"]["max"] == size.tokens
    (evaluated,) = rows_of(run, "evaluate")
    assert evaluated.images == 2
    assert evaluated.loss > 0


def test_parts_of_the_forward_pass_are_timed(trained):
    """All parts are within the forward and backward passes."""
    _, run = trained
    rows = rows_of(run)
    for row in rows:
        parts = (row.vision_s or 0, row.language_s, row.loss_s)
        assert min(parts[1:]) > 0
        assert sum(parts) < row.forward_backward_s
    assert all(row.vision_s for row in rows)
    steady = rows[summarise(run).steps["warmup"] :]
    mean = sum(row.language_s for row in steady) / len(steady)
    assert summarise(run).forward_s["language"] == pytest.approx(mean)


def test_text_run_has_no_image_counts(train_here):
    run = train_here(train={"max_steps": 2})
    assert all(
        row.images is row.image_tokens is row.text_tokens is row.tiles is None for row in read_steps(run.steps)[0]
    )
    assert summarise(run).images_per_s == summarise(run).forward_s == {}
    assert all(row.vision_s is row.language_s is row.loss_s is None for row in read_steps(run.steps)[0])
    assert "image" not in summarise(run).tokens_per_s
    assert "vision_shape" not in read_json(run.applied)


@pytest.fixture
def wide(tmp_path):
    """Write the config.json of a narrow model with many layers and the published number of patches per tile."""

    def write(model):
        config = json.loads(json.dumps(architectures()[model]))
        config["vision_config"] |= {"num_hidden_layers": 24} if model == LLAVA else {"depth": 8}
        if model == LLAVA:
            config["vision_config"]["image_size"] = 336
            config["image_grid_pinpoints"] = [[336, 672], [672, 672]]
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return {"id": model, "path": str(path)}, describe(config).vision

    return write


def parts(model, seen):
    """Return torch's count of the FLOPs of encoder and projector for one image."""
    torch.manual_seed(0)
    image = {"pixel_values": torch.randn(seen["pixels"])} | {
        key: torch.tensor([seen[key]]) for key in seen if "image" in key
    }
    effective_config.base_model(model).set_attn_implementation("eager")  # torch does not count CPU attention
    base = effective_config.base_model(model).model
    with FlopCounterMode(display=False) as counter:
        out = base.get_image_features(**image, return_dict=True)
        made = [*out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
        if any(each.requires_grad for each in made):
            sum(each.float().sum() for each in made).backward()
    return counter.get_total_flops()


FROZEN, JOINED, LEARNING = ("frozen", "frozen"), ("frozen", "full"), ("full", "full")


@pytest.mark.parametrize(("model", "parts_trained"), [
    (LLAVA, FROZEN), (QWEN25, FROZEN), (QWEN3, JOINED), (QWEN3, LEARNING),
    *[pytest.param(model, parts, marks=pytest.mark.exhaustive) for model, parts in (
        (QWEN3, FROZEN), (LLAVA, JOINED), (QWEN25, JOINED), (LLAVA, LEARNING), (QWEN25, LEARNING))],
], ids=lambda value: value if isinstance(value, str) else "+".join(value))  # fmt: skip
def test_flops_of_an_image_equal_torchs_count(cache, wide, model, parts_trained):
    """Up to small terms: LLaVA's class token and unused last layer, and the input gradient of the first product."""
    described, shape = wide(model)
    method = dict(zip(("vision", "projector"), parts_trained, strict=True))
    spec = spec_of(model=described, method=method)
    loaded = methods.load("lora").adapt(methods.load("lora").load(spec, loading.source_of(spec.model)), spec)
    high, wide_ = (672, 672) if model == LLAVA else (14 * 24, 14 * 24) if model == QWEN25 else (384, 384)
    size = shape.size(high, wide_)
    if shape.tile:
        seen = {"pixels": (1, size.tiles, 3, 336, 336), "image_sizes": (high, wide_)}
    else:
        rows, columns = shape.grid(high, wide_)
        seen = {"pixels": (rows * columns, 3 * 2 * shape.patch**2), "image_grid_thw": (1, rows, columns)}
    counted = size.patches * flops.vision_per_patch(effective_config.vision_shape(loaded), size.patches / size.tiles)
    assert counted == pytest.approx(parts(loaded, seen), rel=0.06)


def test_model_flops_include_images(trained, tmp_path):
    run = RunDir(shutil.copytree(trained[1].path, tmp_path / "copy"))
    summary, facts = summarise(run), read_json(run.applied)
    rows = rows_of(run)[summary.steps["warmup"] :]
    window = sum(row.step_time_s for row in rows)
    text = facts | {"vision_shape": None}
    (run.applied).write_text(json.dumps(text))
    without = summarise(run).model_tflops
    patches, shape = sum(row.image_patches for row in rows), flops.VisionMatmulShape(**facts["vision_shape"])
    per_tile = rows[0].image_patches / rows[0].tiles
    expected = patches * flops.vision_per_patch(shape, per_tile) / window / 1e12
    assert summary.model_tflops - without == pytest.approx(expected, rel=1e-6)
    assert StepRow().images is None


def test_text_of_steps_without_images_counts_in_the_text_rate(train_here, tmp_path):
    Image.new("RGB", (90, 60)).save(tmp_path / "a.png")
    text = {"instruction": "Which one?", "output": "a leaf"}
    rows = [text | ({"image": "a.png"} if number % 3 == 0 else {}) for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"name": "file", "path": str(tmp_path / "rows.jsonl"), "samples": None, "mean_length": None}
    run = train_here(model={"id": QWEN3}, dataset=data | {"max_length": 400}, train={"batch_size": 1},
                     measure={"warmup": 0})  # fmt: skip
    steps, _ = read_steps(run.steps)
    assert {row.images for row in steps} == {0, 1}
    rates = summarise(run).tokens_per_s
    assert rates["image"] + rates["text"] == pytest.approx(rates["real"])
