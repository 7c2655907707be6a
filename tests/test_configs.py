"""Every spec that ships loads, and the founding study's are all there."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from ftbench.core.hardware import gpus
from ftbench.spec import sweep
from ftbench.spec.experiment import resolve
from ftbench.spec.incompatibilities import machine_incompatibilities
from ftbench.spec.load import load
from ftbench.spec.methods import Lora
from ftbench.spec.prices import load_prices

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
STUDY = [
    f"{model}-{method}{data}"
    for model, method, data in product(
        ("qwen3-8b", "qwen3-32b", "gpt-oss-20b", "gpt-oss-120b"), ("lora", "qlora", "unsloth"), ("", "-wikipedia")
    )
]
H100 = (9, 0)


def test_every_shipped_spec_loads_and_can_run_on_an_h100():
    for path in CONFIGS.glob("*.yaml"):
        if not path.name.startswith("prices"):
            assert machine_incompatibilities(resolve(load(path), H100), H100) == [], path.name


def test_each_known_card_has_a_price_with_a_currency_a_date_and_a_source():
    prices = load_prices(CONFIGS / "prices.yaml").by_gpu
    assert set(prices) == {gpu.name for gpu in gpus()}
    known = [price.rent or price.owned for price in prices.values()]
    assert all(price.currency == "USD" and price.date and price.source[0].isupper() for price in known)


def test_the_studys_recipes_are_the_ones_it_published():
    for name in STUDY:
        spec = load(CONFIGS / f"{name}.yaml")
        assert spec.dataset.name == ("wikipedia-ja" if name.endswith("wikipedia") else "japanese-alpaca")
        assert (spec.dataset.samples, spec.dataset.max_length, spec.dataset.seed) == (1000, 2048, 42)
        assert (spec.train.learning_rate, spec.train.max_grad_norm, spec.train.epochs) == (2e-4, 0.3, 1)
        assert (spec.method.rank, spec.method.alpha, spec.method.dropout) == (8, 16, 0)
        if name.startswith("gpt-oss") and "qlora" in name:  # the weights as published
            assert spec.method.mxfp4, name


def test_the_sweep_of_images_has_each_combination_of_the_study_at_its_six_batches():
    cells = sweep.cells(CONFIGS / "llava-next.yaml", ())
    assert [cell.refused for cell in cells if cell.refused] == []
    points = {(c.spec.method, c.spec.optimizations, c.spec.dataset, c.spec.train.batch_size) for c in cells}
    assert len(points) == len(cells) == 54
    for path in CONFIGS.glob("llava-next-*.yaml"):
        spec = load(path)
        assert (spec.train.max_steps, spec.dataset.image_size) == (10, (500, 500))
        for batch in (1, 2, 4, 8, 16, 24):
            method = Lora() if path.stem.endswith("qlora") else spec.method  # the sweep trains lora only
            assert (method, spec.optimizations, spec.dataset, batch) in points
