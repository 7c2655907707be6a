"""Vision models train with every method and part. Unsupported options are error messages."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from conftest import spec_of
from ftbench.facts import architectures
from ftbench.families import describe
from ftbench.store.rundir import read_json
from ftbench.worker import methods
from ftbench.worker.measure import effective_config
from ftbench.worker.model import loading, random_weights

MODELS = ["tiny/llava-next", "tiny/qwen2.5-vl", "tiny/qwen3-vl"]
TEXT = {"dataset": {"samples": 2}, "train": {"max_steps": 1}}


def adapted(model, **method):
    spec = spec_of(model={"id": model}, method=method)
    return methods.load(spec.method.name).adapt(
        methods.load(spec.method.name).load(spec, loading.source_of(spec.model)), spec
    )


def kinds_of(model):
    kinds = effective_config.parameters_by_kind(model)
    parts = {part: kinds.pop(part) for part in ("vision", "projector")}
    language = {count: sum(kind[count] for kind in kinds.values()) for count in ("total", "trainable")}
    return parts | {"language": language}


@pytest.mark.parametrize("model", MODELS)
def test_method_selects_the_trained_parts(cache, model):
    shape = describe(architectures()[model])
    totals = {"vision": shape.vision.encoder, "projector": shape.vision.projector, "language": shape.total}
    totals["language"] -= shape.vision.total
    frozen = kinds_of(adapted(model))
    assert frozen["vision"] == {"total": totals["vision"], "trainable": 0}
    assert frozen["projector"] == {"total": totals["projector"], "trainable": 0}
    assert frozen["language"]["trainable"] == frozen["language"]["total"] - totals["language"] > 0
    other = kinds_of(adapted(model, vision="lora", projector="full"))
    assert other["vision"]["trainable"] == other["vision"]["total"] - totals["vision"] > 0
    assert other["projector"] == {"total": totals["projector"], "trainable": totals["projector"]}
    assert other["language"] == frozen["language"]


@pytest.mark.parametrize("model", MODELS)
def test_full_trains_all_weights(cache, model):
    kinds = kinds_of(adapted(model, name="full"))
    assert all(kind["trainable"] == kind["total"] > 0 for kind in kinds.values())


def test_qlora_does_not_quantise_the_encoder(cache):
    spec = spec_of(model={"id": "tiny/llava-next"}, method={"name": "qlora"})
    model = methods.load("qlora").load(spec, loading.source_of(spec.model))
    quantised = {name for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"}
    assert len(quantised) == 2 * 7
    assert all("language_model" in name for name in quantised)


@pytest.mark.parametrize("model", MODELS)
def test_loaded_random_weights_are_deterministic(cache, model):
    """All norms are ones, whatever their name: norm1, layer_norm1, layrnorm, ln_q."""
    spec = spec_of(model={"id": model})
    loaded = loading.load_model(spec, loading.source_of(spec.model)).state_dict()
    again = loading.load_model(spec, loading.source_of(spec.model)).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in loaded.items())
    for name, value in loaded.items():
        if value.ndim == 1 and name.endswith(".weight"):
            assert bool((value == 1).all()), name
        elif value.ndim > 1:
            assert 0.005 < float(value.std()) < 0.1, name


@pytest.mark.parametrize("model", MODELS)
def test_local_model_is_loaded_with_its_processor(train_here, model):
    folder = random_weights.materialise(spec_of(model={"id": model}).model)
    run = train_here(model={"id": "mine", "path": str(folder), "weights": "pretrained"}, **TEXT)
    assert read_json(run.applied)["model"]["class"].endswith("ForConditionalGeneration")


def test_saved_model_is_loaded_with_its_processor(train_here):
    pictures = {"name": "images", "samples": 2, "image_size": [56, 40], "mean_length": 24, "max_length": 128}
    saved = train_here(
        model={"id": MODELS[2]}, method={"name": "full"}, dataset=pictures, measure={"save_adapter": True}
    )
    train_here(model={"id": "mine", "path": str(saved.adapter), "weights": "pretrained"}, dataset=pictures)


@pytest.mark.parametrize("part", ["vision", "projector"])
def test_text_model_rejects_vision_options(cache, part):
    with pytest.raises(ValidationError, match=r"method\.vision.*is text-only"):
        spec_of(method={part: "lora"})


def test_saving_full_parts_is_rejected():
    with pytest.raises(ValidationError, match="save_adapter saves only adapters"):
        spec_of(model={"id": MODELS[0]}, method={"vision": "full"}, measure={"save_adapter": True})


@pytest.mark.parametrize(("changes", "message"), [
    ({"method": {"projector": "full"}}, "unsloth trains only adapters: set them to frozen or lora"),
    ({"optimizations": {"packing": True}}, "optimizations.packing with method unsloth supports only text"),
])  # fmt: skip
def test_text_only_options_of_unsloth_are_rejected(changes, message):
    parts = changes | {"method": {"name": "unsloth"} | changes.get("method", {})}
    with pytest.raises(ValidationError, match=message):
        spec_of(model={"id": MODELS[0]}, **parts)


@pytest.mark.parametrize(("name", "by"), [(MODELS[0], "FastVisionModel"), ("tiny/qwen3", "FastLanguageModel")])
def test_unsloth_loader_matches_the_model(cache, monkeypatch, name, by):
    asked = []

    class Loader:
        def __init__(self, kind):
            self.kind = kind

        def from_pretrained(self, **arguments):
            asked.append((self.kind, arguments["model_name"]))
            return loading.load_model(spec, source), None

        def get_peft_model(self, model, target_modules, **arguments):
            asked.append((self.kind, len(target_modules)))
            return model

    kinds = {kind: Loader(kind) for kind in ("FastVisionModel", "FastLanguageModel")}
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace(**kinds))
    spec = spec_of(model={"id": name}, method={"name": "unsloth", "load_in_4bit": False})
    source = loading.source_of(spec.model)
    unsloth = methods.load("unsloth")
    unsloth.adapt(unsloth.load(spec, source), spec)
    assert asked == [(by, source), (by, 14 if by == "FastVisionModel" else 7)]


@pytest.mark.parametrize("model", ["tiny/llava-next", "tiny/qwen2.5-vl"])
def test_targets_may_be_the_ends_of_names(cache, model):
    def count(**method):
        return sum(p.numel() for p in adapted(model, **method).parameters() if p.requires_grad)

    def trained(*targets):
        return count(targets=targets)

    assert count(targets="all-linear") == count()  # all but the head
    assert trained("self_attn.q_proj") == trained("q_proj") == 2 * trained("layers.0.self_attn.q_proj")
