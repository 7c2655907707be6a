"""gradients.npz of a run is input like any other: broken files and other tensors become sentences, not tracebacks."""

import json

import pytest

pytest.importorskip("numpy", reason="training libraries are not installed")

import numpy as np

from ftbench.spec.experiment import Experiment
from ftbench.store import rundir
from ftbench.sweep import parity_records, verdict
from ftbench.sweep.parity_records import agreement

NAMES = ["model.layers.0.mlp.up_proj.lora_A.default.weight", "model.layers.0.mlp.up_proj.lora_B.default.weight",
         "model.layers.1.mlp.up_proj.lora_B.default.weight"]  # fmt: skip


def kept(path, **changes):
    """Write a record of three tensors and four samples."""
    rows = np.random.default_rng(0).normal(size=(2, 3, 5))
    rows[..., 0] = np.linalg.norm(rows[..., 1:], axis=-1)
    settings = np.array(json.dumps({"lr": ["0.1"], "betas": ["None"]}))
    arrays = {
        "names": np.array(NAMES),
        "settings": settings,
        "samples": np.arange(4),
        "losses": np.ones((4, 4)),
        "initial": np.array([1.0, 0.0, 0.0]),
    }
    arrays |= dict.fromkeys(parity_records.CHANGES, rows)
    arrays |= {name: change(arrays[name].copy()) if callable(change) else change for name, change in changes.items()}
    run = rundir.RunDir(path)
    path.mkdir()
    with run.gradients.open("wb") as file:
        np.savez_compressed(file, **{name: array for name, array in arrays.items() if array is not None})
    return run


def without(array, *places, value=0.0):
    array[:, list(places)] = value
    return array


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"samples": np.arange(4)[::-1]}, ""),  # in another order
        ({"samples": np.arange(4) + 1}, "its tokens or labels differ from the reference's"),
        ({"names": np.array([NAMES[0], "x", NAMES[2]])}, "up_proj.lora_B not trained, and plain trains them"),
        ({"moment": lambda a: 0 * a}, ""),  # an optimizer with other states
        ({"moment": lambda a: np.nan * a}, ""),  # all states in 8 bits
        ({"moment": lambda a: without(a, 0, value=np.nan)}, ""),  # a tensor with states in 8 bits
        ({"moment": lambda a: without(a, 0)}, "layers.0.mlp.up_proj.lora_A has no second moment at initial weights"),
        ({"moment": lambda a: without(without(a, 1, 2, value=np.nan), 0)}, "lora_A has no second moment"),
        ({"gradient": lambda a: without(a, 0)}, "layers.0.mlp.up_proj.lora_A has no gradient at initial weights"),
        ({"steps": lambda a: without(a, 1, 2)}, "layers.1.mlp.up_proj.lora_B has no weight change at trained weights"),
        ({"gradient": lambda a: without(a, 1, 2)}, "up_proj (2 tensors, first model.layers.0.mlp.up_proj.lora_B)"),
        ({"gradient": lambda a: without(a, 0, value=np.nan)}, "has a gradient that is not finite"),
        ({"settings": np.array(json.dumps({"lr": ["0.2"]}))}, "the optimizer's lr is 0.2, and plain's is 0.1"),
        ({"initial": np.array([1.1, 0.0, 0.5])}, "layers.1.mlp.up_proj.lora_B initialised differently"),
        ({"losses": None}, "the run recorded no gradients"),
        ({"names": np.array([{}, {}, {}], dtype=object)}, "the run recorded no gradients"),
    ],
)  # fmt: skip
def test_differences_become_sentences(tmp_path, changes, said):
    found = agreement(kept(tmp_path / "good"), kept(tmp_path / "other", **changes))
    assert said in "; ".join(found["problems"])
    assert bool(found["problems"]) is bool(said)
    if not said:
        moments = np.load(tmp_path / "other" / "gradients.npz")["moment"][0, :, 0]
        unknown = int((~(moments > 0)).sum())
        assert len(found["tensors"]) == 2 * (3 * 4 - unknown)
        assert max(abs(number) for row in found["tensors"] for number in row[3:]) < 1e-6


def test_direction_and_norm_are_those_of_the_tensors(tmp_path):
    def doubled(array):
        return 2 * array

    found = agreement(kept(tmp_path / "good"), kept(tmp_path / "other", gradient=doubled, step=lambda a: -a))
    errors = {row[1]: row[3:] for row in found["tensors"]}
    assert errors["gradient"] == pytest.approx([0.0, np.log(2)], abs=1e-6)
    assert errors["steps"] == pytest.approx([0.0, 0.0], abs=1e-6)


def test_second_moments_are_compared_as_without_clipping(tmp_path):
    """Clipping makes both second moments equal here. Without clipping, the second would be twice the first."""
    clipped = {"settings": np.array(json.dumps({"max_grad_norm": ["0.5"]}))}
    good, other = kept(tmp_path / "good", **clipped), kept(tmp_path / "other", gradient=lambda a: 2 * a, **clipped)
    errors = {row[1]: row[4] for row in agreement(good, other)["tensors"]}
    assert errors["moment"] == pytest.approx(np.log(2), abs=1e-6)
    assert errors["steps"] == pytest.approx(0.0, abs=1e-6)


def test_recipe_may_change_some_of_the_weights_that_plain_bfloat16_does_not_change(tmp_path):
    """Stochastic rounding changes one of two such tensors."""
    good, plain = kept(tmp_path / "good"), kept(tmp_path / "plain", **still(0, 1))
    spec = Experiment.model_validate({"name": "a", "model": {"id": "tiny/qwen3"}, "dataset": {"name": "sample"}})
    rounding = [agreement(good, plain)]
    cases = [(still(0), "pass"), (still(0, 1), "pass"), (still(0, 2), "fail"), ({"step": still(0)["step"]}, "pass")]
    for number, (changes, state) in enumerate(cases):
        mine = agreement(good, kept(tmp_path / str(number), **changes))
        assert verdict.gradient(mine, rounding, spec).state == state


def still(*places):
    return dict.fromkeys(("step", "steps"), lambda array: without(array, *places))


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_unreadable_files_are_reported(tmp_path, damage):
    good, other = kept(tmp_path / "good"), kept(tmp_path / "other")
    content = other.gradients.read_bytes()
    other.gradients.unlink()
    if damage == "cut":
        other.gradients.write_bytes(content[:-40])
    assert agreement(good, other)["problems"] == ["the run recorded no gradients"]
