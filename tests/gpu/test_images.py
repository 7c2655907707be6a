"""Models of images and text train on a GPU, and their optimizations learn the same as the plain run. The models are
tiny and run side by side; most of the time goes into imports and the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
from methods import ON_GPU, why

from ftbench.store.steps import read_steps

torch = pytest.importorskip("torch", reason="training libraries are not installed")
pytestmark = [*ON_GPU, pytest.mark.timeout(600)]

LLAVA, QWEN25, QWEN3 = ("tiny/llava-next", "tiny/qwen2.5-vl", "tiny/qwen3-vl")
MANY_SIZES = (
    "dataset={name: images, samples: 48, image_size: [120, 90], image_sizes: photographs, mean_length: 20, "
    "max_length: 512}"
)
ONE_A_ROW = (
    "dataset={name: images, samples: 48, image_size: [240, 180], length: 20, max_length: 120, images_per_sample: 2}"
)
WAYS = {
    "loader": ("optimizations.image_cache=on", "optimizations.loader_processes=2"),
    "chunked-loss": ("optimizations.chunked_loss=on",),
    "padding-free": ("optimizations.padding_free=on",),
    "varlen": ("optimizations.padding_free=on", "optimizations.attention=varlen", "optimizations.fused_lora=on"),
    "kernels": (
        "optimizations.padding_free=on", "optimizations.attention=varlen", "optimizations.fused_lora=on",
        "optimizations.triton_kernels=on",
    ),
    "compile": ("optimizations.compile=on", "optimizations.fixed_shape=on"),
}  # fmt: skip
FIRST = [(LLAVA, "varlen"), (LLAVA, "compile"), (QWEN3, "varlen")]
REST = [(LLAVA, name) for name in ("kernels", "loader", "chunked-loss", "padding-free")]
REST += [(QWEN25, "varlen"), (QWEN25, "compile"), (QWEN3, "compile")]
SAME = [*FIRST, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in REST)]
UNSLOTH = "method={{name: unsloth, load_in_4bit: {}, use_gradient_checkpointing: off}}"
BY_UNSLOTH = [(LLAVA, "off"), pytest.param(LLAVA, "on", marks=pytest.mark.exhaustive), (QWEN3, "off")]
TRAINED = ("method={name: lora, vision: lora, projector: full}",)
RECIPES = {"16-bit": ("recipe=fastest-vision",), "8-bit": ("recipe=fastest-vision-fp8",)}


def changes(model, data, sets=()):
    return (f"model={model}", data, "train.max_steps=8", *sets)


# Runs that start before the tests (`conftest.needed`). The slowest are the first.
RUNS = [
    *(changes(LLAVA, ONE_A_ROW, sets) for sets in RECIPES.values()),
    *(changes(model, MANY_SIZES, WAYS[name]) for model, name in FIRST),
    *(changes(model, MANY_SIZES, sets) for model in (LLAVA, QWEN3) for sets in ((UNSLOTH.format("off"),), ())),
    changes(LLAVA, ONE_A_ROW),
]


@pytest.fixture
def summary(run):
    def of(*sets):
        _, document = run(*changes(*sets))
        assert document["summary"]["state"] == "ok", why(document)
        return document["summary"] | {"run_dir": document["run_dir"]}

    return of


def first_norm(summary):
    """Compare gradients, which show differences that the loss of random weights hides."""
    return read_steps(Path(summary["run_dir"], "steps.csv"))[0][0].grad_norm


@pytest.mark.parametrize(("model", "name"), SAME)
def test_it_learns_what_the_plain_run_learns(summary, model, name):
    plain, other = summary(model, MANY_SIZES), summary(model, MANY_SIZES, WAYS[name])
    assert plain["dataset"]["order_hash"] == other["dataset"]["order_hash"]
    assert other["loss"]["last"] == pytest.approx(plain["loss"]["last"], rel=0.005)
    assert first_norm(other) == pytest.approx(first_norm(plain), rel=0.01)
    assert other["images_per_s"]["images"] > 0
    assert 0 < other["forward_s"]["vision"] < other["step_time_s"]["mean"]


@pytest.mark.parametrize(("model", "bits"), BY_UNSLOTH)
def test_unsloth_trains_its_own_classes_and_begins_where_the_plain_run_begins(summary, model, bits):
    plain, other = summary(model, MANY_SIZES), summary(model, MANY_SIZES, (UNSLOTH.format(bits),))
    assert plain["dataset"]["order_hash"] == other["dataset"]["order_hash"]
    first, expected = (read_steps(Path(each["run_dir"], "steps.csv"))[0][0].loss for each in (other, plain))
    assert first == pytest.approx(expected, rel=0.02 if bits == "on" else 0.002)
    assert 0 < other["forward_s"]["vision"] < other["step_time_s"]["mean"]


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_learns_what_the_plain_run_learns(summary, name):
    plain, fast = summary(LLAVA, ONE_A_ROW), summary(LLAVA, ONE_A_ROW, RECIPES[name])
    assert plain["dataset"]["order_hash"] == fast["dataset"]["order_hash"]
    assert fast["loss"]["last"] == pytest.approx(plain["loss"]["last"], rel=0.02 if name == "8-bit" else 0.005)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", [LLAVA, QWEN3])
def test_an_encoder_and_a_projector_are_trained_too(summary, model):
    plain, whole = summary(model, MANY_SIZES), summary(model, MANY_SIZES, TRAINED)
    assert whole["parameters"]["trainable"] > plain["parameters"]["trainable"]


@pytest.mark.parametrize("rows", [1, 577, 11_540])
def test_products_in_8_bits_take_any_number_of_rows(rows):
    """Also the 577 tokens of a tile."""
    from ftbench.worker.optimizations.fp8 import Fp8Linear

    torch.manual_seed(0)
    base = torch.nn.Linear(1024, 4096, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for one, other in zip(_made(base, x), _made(Fp8Linear(base, "tensorwise"), x), strict=True):
        assert (other - one).float().norm() < 0.1 * one.float().norm()


def _made(layer, x):
    """Return a layer's output, and the gradient of a weighted sum of its columns."""
    made = layer(x)
    weights = torch.linspace(-1, 1, made.shape[-1], device="cuda", dtype=made.dtype)
    return made.detach(), torch.autograd.grad((made * weights).sum(), x)[0]
