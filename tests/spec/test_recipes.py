"""Shipped recipes: complete, valid for their methods, and found from any folder."""

import pytest

from ftbench.errors import SpecError
from ftbench.spec.experiment import resolve
from ftbench.spec.incompatibilities import incompatibilities, machine_incompatibilities
from ftbench.spec.load import load, recipes
from ftbench.spec.optimizations import compute
from ftbench.spec.sweep import cells

H200 = (9, 0)
MODEL = "model: {id: Qwen/Qwen3-8B, weights: random}\n"
VISION = "model: {id: tiny/llava-next, weights: random}\ndataset: {name: images, samples: 8, image_size: [60, 40]}\n"
IS_FOR = {
    "plain": ("lora", "qlora", "full", "unsloth"),
    "fastest": ("lora", "qlora"),
    "fastest-fp8": ("lora",),
    "fastest-full": ("full",),
    "fastest-full-fp8": ("full",),
    "fastest-qlora": ("qlora", "lora"),
    "fastest-small": ("lora", "qlora"),
    "fastest-vision": ("lora", "qlora"),
    "fastest-vision-fp8": ("lora",),
    "small": ("qlora", "lora"),
    "smallest": ("qlora", "lora"),
    "smallest-exact": ("lora",),
    "smallest-full": ("full",),
}


@pytest.fixture
def write(tmp_path):
    def file(text, name="spec.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        return path

    return file


@pytest.mark.parametrize(("name", "method"), [(name, method) for name in IS_FOR for method in IS_FOR[name]])
def test_recipe_works_with_its_methods(write, name, method):
    model = VISION if "vision" in name else MODEL
    spec = resolve(load(write(f"recipe: {name}\n{model}method: {method}\n")), H200)
    assert spec.method.name == method
    assert incompatibilities(spec) == []
    assert machine_incompatibilities(spec, H200) == []


@pytest.mark.parametrize("name", recipes())
def test_recipe_sets_every_optimization(write, name):
    loud = {"gradient_checkpointing": True, "length_grouping": True, "attention": "eager", "compile": "dynamic"}
    loud["triton_kernels"] = True
    lines = "".join(f"  {key}: {str(value).lower()}\n" for key, value in loud.items())
    model = VISION if "vision" in name else MODEL
    there = load(write(f"{model}optimizations:\n{lines}train: {{optimizer: sgd}}\n"), [f"recipe={name}"])
    alone = load(write(f"recipe: {name}\n{model}", "alone.yaml"))
    assert there.optimizations == alone.optimizations
    assert there.train.optimizer == alone.train.optimizer != "sgd"


AMPERE, BLACKWELL = (8, 0), (12, 0)
UNKNOWN = "model: {id: openai/gpt-oss-20b, weights: random}\n"
LLAVA = VISION.replace("tiny/llava-next", "llava-hf/llava-v1.6-mistral-7b-hf")
QWEN_VL = VISION.replace("tiny/llava-next", "Qwen/Qwen2.5-VL-3B-Instruct")


@pytest.mark.parametrize(
    ("model", "capability", "sets", "why"),
    [
        (MODEL, H200, [], None),
        (MODEL, BLACKWELL, [], "measured only on compute capability 9.0"),
        (MODEL, AMPERE, [], "measured only on compute capability 9.0"),
        (UNKNOWN, H200, [], "do not support the layers of gpt_oss"),
        (LLAVA, H200, ["optimizations.cuda_graph=off"], None),
        (QWEN_VL, H200, ["optimizations.cuda_graph=off"], "do not support the layers of qwen2_5_vl_text"),
        (MODEL, H200, ["launch.gpus=2", "launch.strategy=fsdp", "optimizations.fused_lora=off"], "not tested with"),
    ],
)
def test_auto_kernels_are_on_only_if_measured(write, model, capability, sets, why):
    for name, by_kernels in (("fastest", "off"), ("fastest-fp8", "tensorwise-delayed")):
        if "launch.strategy=fsdp" in sets and name == "fastest-fp8":
            continue  # impossible on any machine
        spec = load(write(model), [f"recipe={name}", *sets])
        word, resolved = compute.kernels_left_out(spec, capability), resolve(spec, capability)
        assert resolved.optimizations.triton_kernels is (why is None)
        assert resolved.optimizations.fp8 == (by_kernels if why is None or name == "fastest" else "tensorwise")
        assert incompatibilities(resolved) == []
        assert (word is None) if why is None else why in word


def test_explicit_kernels_stay_on(write):
    spec = load(write(MODEL), ["recipe=fastest-fp8", "optimizations.triton_kernels=on"])
    assert compute.kernels_left_out(spec, AMPERE) is None
    resolved = resolve(spec, BLACKWELL).optimizations
    assert (resolved.triton_kernels, resolved.fp8) == (True, "tensorwise-delayed")


def test_full_training_in_8_bits_needs_16_bit_weights(write):
    with pytest.raises(SpecError, match="with method full trains 16-bit weights"):
        load(write(MODEL), ["recipe=fastest-full-fp8", "model.dtype=float32"])


def test_recipe_is_merged_between_base_and_file(write):
    write("train: {batch_size: 2, optimizer: sgd}\noptimizations: {liger: on}\n", "base.yaml")
    spec = load(write(f"extends: base.yaml\nrecipe: fastest\n{MODEL}optimizations: {{compile: off}}\n"))
    assert (spec.train.batch_size, spec.train.optimizer) == (2, "adamw_torch_fused")
    assert (spec.optimizations.liger, spec.optimizations.packing, spec.optimizations.compile) == (False, True, False)


def test_recipe_can_be_an_axis(write):
    axes = "{recipe: [plain, fastest, own.yaml], method: [lora, unsloth]}"
    path = write(f"{MODEL}sweep: {{axes: {axes}}}\n")
    write("optimizations: {compile: on}\n", "own.yaml")
    found = cells(path, ())
    assert [cell.values["recipe"] for cell in found[::2]] == ["plain", "fastest", str(path.parent / "own.yaml")]
    for cell in found:
        if cell.spec:
            assert load(path, cell.sets) == cell.spec
    assert "with method unsloth" in found[3].refused


def test_other_axes_override_the_recipe_of_a_cell(write):
    """`--method` comes before `--axis recipe=...` on the command line, and a recipe sets a method too."""
    path = write(MODEL)
    found = cells(path, (), ["method=lora,qlora", "recipe=plain,fastest-qlora"])
    assert [cell.spec.method.name for cell in found] == [cell.values["method"] for cell in found]
    assert len({cell.spec for cell in found}) == 4
    assert all(load(path, cell.sets) == cell.spec for cell in found)


@pytest.mark.parametrize(
    ("text", "sets", "expected"),
    [
        ("recipe: fastes\n", (), "did you mean fastest?"),
        ("recipe: [fastest]\n", (), "must be the name of a recipe"),
        ("recipe: other.yaml\n", (), "not model: use `extends:`"),
        ("", ("recipe=slowest",), "plain, fastest, fastest-fp8, fastest-full, fastest-full-fp8, fastest-qlora, "),
        ("", ("recipe=.",), "a folder, not a file"),
    ],
)
def test_unknown_recipe_lists_the_known_ones(write, text, sets, expected):
    write(MODEL, "other.yaml")
    path = write(text + MODEL)
    with pytest.raises(SpecError) as caught:
        load(path, sets)
    assert expected in str(caught.value)
    if text:
        assert str(caught.value).startswith(f"{path}:1: ")
