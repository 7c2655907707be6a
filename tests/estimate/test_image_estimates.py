"""Estimates of models that read images: against what plain scripts took on an H200, by image size, from files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ftbench.core.hardware import find_gpu
from ftbench.errors import SpecError
from ftbench.estimate import estimates
from ftbench.estimate.memory.estimate import MemoryEstimate, estimate_memory
from ftbench.estimate.memory.largest_batch import MemoryCache
from ftbench.estimate.recommend import ranking
from ftbench.estimate.recommend import request as recommend
from ftbench.estimate.time.duration import estimate_duration
from ftbench.estimate.time.history import RunHistory, step_key
from ftbench.estimate.workload import images
from ftbench.estimate.workload.largest import BatchShape, Largest, largest
from ftbench.estimate.workload.model import shape_of
from ftbench.families.vision import ImageSize
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.load import load

CONFIG = Path(__file__).parents[2] / "configs" / "llava-next.yaml"
LLAVA, QWEN = "llava-hf/llava-v1.6-mistral-7b-hf", "Qwen/Qwen2.5-VL-7B-Instruct"
MADE = {"name": "images", "samples": 64, "image_size": [500, 500], "max_length": 4096}
# Peak GiB of tensors of a plain script with trl 1.14.2 on one H200 (2026-11-22): LLaVA-NeXT's shape, LoRA of rank 8 on
# the language model; 500 x 500 pixels and 20 to 60 words, or two tiles of 336 x 336 and 40 words. Batch, tokens of the
# longest row, whether rows are padded, optimizations.
MEASURED = [
    (34.3, 1, 2964, False, {}),
    (100.1, 4, 2991, True, {}),
    (31.0, 8, 2991, True, {"gradient_checkpointing": True}),
    (75.4, 4, 2991, True, {"compile": True}),
    (78.9, 8, 1216, False, {"fixed_shape": True}),
    (58.7, 8, 1216, False, {"fixed_shape": True, "compile": True}),
    (20.1, 1, 1216, False, {"fixed_shape": True, "compile": True}),
]


def gpu(name: str = "NVIDIA H200") -> Any:
    found = find_gpu(name)
    assert found is not None
    return found


def spec_of(model: str = LLAVA, dataset: dict[str, Any] | None = None, **sections: Any) -> Experiment:
    values = {"name": "x", "model": {"id": model, "weights": "random"}, "dataset": dataset or MADE}
    return resolve(Experiment.model_validate({**values, **sections}), (9, 0))


@pytest.mark.parametrize(("peak", "rows", "length", "padded", "on"), MEASURED)
def test_memory_agrees_with_a_plain_script(
    peak: float, rows: int, length: int, padded: bool, on: dict[str, Any]
) -> None:
    image = ImageSize(1176, 2, 2 * 577) if "fixed_shape" in on else ImageSize(2928, 5, 5 * 577)
    images = ImageSize(image.tokens * rows, image.tiles * rows, image.patches * rows)
    batch = BatchShape(rows, length, 40 * rows, images)
    spec = spec_of(train={"batch_size": rows}, optimizations=on)
    estimate = estimate_memory(spec, gpu(), batch=Largest(batch, batch, padded, False, ""))
    assert estimate.allocated.expected == pytest.approx(peak, rel=0.02)


def test_single_samples_of_different_lengths_leave_unused_blocks() -> None:
    """For 16.4 GiB of tensors, a run with batch 1 reserved 17.2. A run with QLoRA and batch 8: 62.0 for 31.0 GiB."""

    def memory(batch: int, config: str = "bf16") -> MemoryEstimate:
        sets = [f"train.batch_size={batch}", "optimizations.gradient_checkpointing=on", "model.weights=random"]
        return estimate_memory(load(Path(f"configs/llava-next-{config}.yaml"), sets), gpu("NVIDIA H100 80GB HBM3"))

    one, eight = memory(1), memory(8, "qlora")
    assert one.reserved.low < 17.16 < one.reserved.high
    assert one.reserved.expected == pytest.approx(17.16, rel=0.015)
    assert eight.allocated.expected == pytest.approx(31.03, rel=0.01)
    assert eight.reserved.expected == pytest.approx(62.02, rel=0.02)


def test_each_batch_longer_than_all_earlier_ones_leaves_the_widest_tensors_unused() -> None:
    """QLoRA has six float32 tensors of the MLP at the same time. The positions of image features hold one of them.

    A run with batch 4 of 10 steps reserved 3.21 to 3.27 GiB in each step with a longer batch. A run with
    `longest_first` has no such step. A full GPU has no unused blocks."""
    images, sets = ImageSize(4 * 2928, 20, 20 * 577), ["train.batch_size=4", "optimizations.gradient_checkpointing=on"]
    spec = load(Path("configs/llava-next-qlora.yaml"), sets)

    def reserved(*tokens: int, total: float = 140.0) -> float:
        batch = BatchShape(4, tokens[-1] // 4, 160, images)
        found = Largest(batch, batch, True, False, "", unequal=True, records=tokens)
        return estimate_memory(spec, gpu(), total=total, batch=found).reserved.expected

    once, twice = reserved(12236), reserved(12124, 12236)
    assert twice - once == pytest.approx(3.27, rel=0.05)
    assert reserved(12235, 12236) == pytest.approx(once, abs=0.01)  # the allocator rounds blocks to 2 MiB
    assert reserved(12124, 12236, total=24.0) < 24.0 < twice


def test_the_range_contains_the_step_of_a_plain_script() -> None:
    """1.65 s at batch 4 with images processed in the step, 1.40 s with loader processes (the same script)."""
    for on, step in ({}, 1.65), ({"loader_processes": 8}, 1.40):
        band = estimate_duration(spec_of(train={"batch_size": 4}, optimizations=on), gpu()).step_s
        assert band.low < step < band.high
    slow, fast = (estimate_duration(spec_of(optimizations=on), gpu()) for on in ({}, {"image_cache": True}))
    assert fast.step_s.expected <= slow.step_s.expected


def test_samples_and_images_are_counted_by_the_familys_rule() -> None:
    """Tokens and tiles of docs/how-to/images.md, and a token behind each picture."""
    for model, tokens, tiles in (LLAVA, 2928, 5), (QWEN, 324, 1), ("Qwen/Qwen3-VL-8B-Instruct", 256, 1):
        spec = spec_of(model, {**MADE, "length": 40, "images_per_sample": 2}, train={"batch_size": 3})
        found = largest(spec, shape_of(spec.model).vision)
        assert found.expected.length == 2 * (tokens + 1) + 40
        assert (found.expected.images.tokens, found.expected.images.tiles) == (6 * tokens, 6 * tiles)
        assert found.expected.labels == 3 * 40
        assert found.most == found.expected


def test_scaled_images_have_fewer_tokens() -> None:
    spec = spec_of(dataset={**MADE, "length": 40}, optimizations={"image_size": 336})
    assert largest(spec, shape_of(spec.model).vision).expected.images.tokens == 4 * 1176


def test_packed_rows_hold_whole_samples() -> None:
    spec = spec_of(QWEN, {**MADE, "length": 40, "max_length": 1000}, train={"batch_size": 2}, optimizations={
        "packing": True, "attention": "varlen"})  # fmt: skip
    found = largest(spec, shape_of(spec.model).vision).expected
    assert (found.rows, found.length) == (1, 2 * 2 * (324 + 1 + 40))
    assert found.images.tokens == 4 * 324


def test_larger_images_leave_room_for_fewer() -> None:
    sizes = [
        MemoryCache().largest_batch(spec_of(QWEN, {**MADE, "image_size": [side, side], "max_length": 8192}), gpu())
        for side in (336, 500, 1024)
    ]
    assert all(size is not None for size in sizes)
    assert sizes == sorted(sizes, key=lambda size: -(size or 0))
    assert len(set(sizes)) == 3


@pytest.mark.parametrize("model", [LLAVA, QWEN, "Qwen/Qwen3-VL-8B-Instruct"])
def test_more_tokens_of_images_take_longer(model: str) -> None:
    """Uses one history, which caches the work of a step."""
    store = RunHistory()
    sizes = {"image_size": [336, 336]}, {"image_size": [336, 336], "images_per_sample": 2}, {"image_size": [500, 500]}
    specs = [spec_of(model, MADE | {"max_length": 8192} | size) for size in sizes]
    steps = [estimate_duration(spec, gpu(), store).step_s.expected for spec in specs]
    assert steps == sorted(set(steps))
    assert len({step_key(spec) for spec in specs}) == len(specs)


def test_the_images_of_a_file_are_read(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    for name, size in {"a.png": (500, 500), "b.png": (1024, 1024)}.items():
        pillow.new("RGB", size).save(tmp_path / name)
    rows = [{"image": name, "text": "a leaf"} for name in ("a.png", "b.png")]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"name": "file", "path": str(tmp_path / "rows.jsonl"), "max_length": 4096}
    spec = spec_of(QWEN, data, train={"batch_size": 2})
    found = largest(spec, shape_of(spec.model).vision)
    options = ranking.recommend(ranking.Goal(spec, (gpu(),), 2)).options
    assert {option.spec.method.name for option in options} == {"lora", "qlora"}
    assert found.expected.images.tokens == 324 + 1369
    assert found.most.images.tokens == 2 * 1369
    (tmp_path / "b.png").write_text("no image")
    with pytest.raises(
        SpecError, match=r"rows\.jsonl, line 2: its image cannot be read .*cannot identify image file\)$"
    ):
        estimate_memory(spec_of(QWEN, data | {"seed": 7}), gpu())
    (tmp_path / "b.png").unlink()
    os.mkfifo(tmp_path / "b.png")
    with pytest.raises(SpecError, match=r"rows\.jsonl, line 2: its image cannot be read .*not a regular file"):
        estimate_memory(spec_of(QWEN, data | {"seed": 8}), gpu())


def test_a_long_file_with_images_is_counted_completely(tmp_path: Path) -> None:
    """An estimate reads every second of 5,000 rows. One of three samples is too long, and training excludes it."""
    pillow = pytest.importorskip("PIL.Image")
    for name, size in {"a.png": (100, 100), "b.png": (1024, 1024)}.items():
        pillow.new("RGB", size).save(tmp_path / name)
    rows = [{"image": "b.png" if at % 3 == 0 else "a.png", "text": "a leaf"} for at in range(5000)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"name": "file", "path": str(tmp_path / "rows.jsonl"), "max_length": 1024}
    samples = RunHistory().with_sample_count(spec_of(QWEN, data)).dataset.samples
    assert samples == pytest.approx(5000 * 2 / 3, abs=5)


def test_samples_with_too_many_image_tokens_are_excluded(tmp_path: Path) -> None:
    """A photograph with an orientation tag; images by a name of the spec's, and in messages; texts of
    parts, and a caption."""
    image = pytest.importorskip("PIL.Image")
    exif = image.Exif()
    exif[0x112] = 6
    image.new("RGB", (1920, 1080)).save(tmp_path / "a.jpg", exif=exif)
    own = [{"type": "image", "path": "a.jpg"}, {"type": "text", "text": "What is it?"}]
    chat = [{"role": "user", "content": own}, {"role": "assistant", "content": [{"type": "text", "text": "A leaf."}]}]
    tokens = shape_of(spec_of(LLAVA).model).vision.size(1920, 1080).tokens
    assert tokens != shape_of(spec_of(LLAVA).model).vision.size(1080, 1920).tokens
    for row, columns, turns in [
        ({"photos": ["a.jpg"], "caption": "A leaf of ivy, green"}, {"images": "photos"}, 1),
        ({"messages": chat}, {}, 2), ({"prompt": chat[:1], "completion": chat[1:]}, {}, 2),
    ]:  # fmt: skip
        folder = tmp_path / next(iter(row))
        folder.mkdir()
        (folder / "a.jpg").write_bytes((tmp_path / "a.jpg").read_bytes())
        (folder / "rows.jsonl").write_text(json.dumps(row))
        data = {"name": "file", "path": str(folder / "rows.jsonl"), "max_length": 4096, "columns": columns}
        known = images.known_samples(spec_of(LLAVA, data), shape_of(spec_of(LLAVA).model).vision)
        assert known is not None
        assert known.samples[0].images.tokens == tokens
        assert known.samples[0].labels > 5 * turns  # more than the template's own


def test_image_sizes_of_unknown_sets_are_an_error() -> None:
    assert estimate_memory(spec_of(dataset={"name": "beans", "max_length": 4096}), gpu()).batch[1] > 2928
    with pytest.raises(SpecError, match=r"image sizes of me/mine are not known: .*image_size"):
        estimate_memory(spec_of(dataset={"name": "me/mine", "max_length": 4096}), gpu())


def test_a_model_that_reads_images_is_estimated_on_text_too() -> None:
    estimate = estimate_memory(spec_of(dataset={"name": "synthetic", "samples": 8, "length": 512}), gpu())
    assert "images" not in estimate.parts


def test_the_shipped_config_is_estimated_by_the_command() -> None:
    answer = estimates.estimate(estimates.EstimateRequest(CONFIG, ["train.batch_size=4"], gpu="H200 SXM"))
    assert "synthetic pictures of 500 x 500 pixels" in answer.text
    assert "largest that fits: " in answer.text


def test_recommend_keeps_resolution_and_trained_parts(tmp_path: Path) -> None:
    sets = ["optimizations.image_size=336", "method.vision=lora"]
    answer = recommend.answer(
        recommend.RecommendRequest(CONFIG, sets, gpu="H200 SXM", samples=20_000, deadline_s=8 * 3600)
    )
    for option in answer.options:
        assert option.spec.optimizations.image_size == 336
        assert getattr(option.spec.method, "vision", None) == "lora"
    assert answer.options[0].spec.optimizations.image_cache


def test_image_recipes_are_not_offered_for_text() -> None:
    request = recommend.RecommendRequest(CONFIG.with_name("qwen3-8b-recipes.yaml"), gpu="H200 SXM")
    assert not any("image" in reason for reason in recommend.answer(request).ruled_out)
