"""The current limits give the verdicts of results/*/parity, with the plain runs that each check used."""

import json
import math
import statistics
from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest

from ftbench.spec.experiment import Experiment
from ftbench.sweep import verdict

ROOT = Path(__file__).parents[1]
OFF = (False, None, "off", "auto", 0)
JUDGED = ROOT / "results/h200/parity/judged"
FOLDERS = sorted(path.parent for path in ROOT.glob("results/*/parity/*/*/parity.json"))


@cache
def records(folder: Path, control: str = "off") -> list[tuple[Experiment, dict]]:
    """Return the runs of a folder that recorded gradients: those with this control."""
    found = []
    for path in sorted(folder.glob("*/agreement.json")):
        known = json.loads(path.with_name("spec.json").read_text())
        spec = Experiment.model_validate({key: value for key, value in known.items() if key in Experiment.model_fields})
        if spec.measure.control == control:
            found.append((spec, json.loads(path.read_text())))
    return found


def is_plain(spec: Experiment) -> bool:
    on = spec.optimizations
    return spec.method.name != "unsloth" and not (on.chunked_loss or on.compile or on.weight_offload)


def is_other_plain(spec: Experiment) -> bool:
    """Return whether a run of a mixture of experts is plain, with eager attention or compiled layers."""
    return set() < {name for name, value in spec.optimizations if value not in OFF} <= {"attention", "compile"}


def plain_runs(runs: list[tuple[Experiment, dict]]) -> list[dict]:
    """Return the plain runs in 16 bits, also those with eager attention or compiled layers."""
    return [record for spec, record in runs if spec.train.precision == "bf16"
            and (is_plain(spec) or is_other_plain(spec))]  # fmt: skip


def yardsticks(judged: Experiment, runs: list[tuple[Experiment, dict]]) -> list[dict]:
    """Return the plain runs in the precision of a judged run, which set its limits."""
    fp8 = judged.optimizations.fp8 != "off"
    return [record for spec, record in runs if is_plain(spec) and spec.train.precision == judged.train.precision
            and spec.measure.round_products == fp8 and spec.method.quantised == judged.method.quantised
            and getattr(spec.method, "experts", False) == getattr(judged.method, "experts", False)]  # fmt: skip


def optimizations(names: Iterable[str]) -> frozenset[str]:
    """Return what distinguishes the recipes of a folder: their optimizations, without the kernel of the attention."""
    return frozenset(names) - {"attention"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: "-".join(path.parts[-4:]))
def test_committed_verdicts_follow_from_the_recorded_errors(folder):
    runs = [(spec, record) for spec, record in records(folder) if not is_other_plain(spec)]
    judged = [(spec, record) for spec, record in runs if not is_plain(spec)]
    kept = {optimizations(recipe["settings"]["optimizations"].split()): recipe["levels"]
            for recipe in json.loads((folder / "parity.json").read_text())["recipes"]}  # fmt: skip
    assert len(kept) == len(judged)
    names = [optimizations(name for name, value in spec.optimizations if value not in OFF) for spec, _ in judged]
    for level in (verdict.forward, verdict.gradient):
        found = [level(record, yardsticks(spec, runs), spec) for spec, record in judged]
        assert [each.state for each in found] == [kept[each][level.__name__]["state"] for each in names]
    checks = [each for spec, record in judged for each in verdict.tensor_checks(record, yardsticks(spec, runs), spec)]
    if all(each.state == "pass" for each in found):  # correct recipes stay away from the limits
        assert max(each.share for each in checks if ": median" not in each.what) <= 0.9


def test_rounding_errors_of_experts_vary_between_plain_runs():
    """With one plain run, some correct plain runs fail. With two or three, they pass, and a control still fails."""
    runs = [(spec, record) for spec, record in records(JUDGED / "fastest-moe") if spec.method.experts]
    plain = plain_runs(runs)
    ((recipe, judged),) = [(spec, record) for spec, record in runs if spec.optimizations.packing]

    def states(record: dict, others: list[dict]) -> list[str]:
        return [level(record, others, recipe).state for level in (verdict.forward, verdict.gradient)]

    assert len(plain) == 3
    alone = [states(each, [other]) for each in plain for other in plain if each is not other]
    assert sum("fail" in each for each in alone) == 3
    for each in plain:
        assert states(each, [other for other in plain if other is not each]) == ["pass", "pass"]
    by_default = [(spec, record) for spec, record in runs if not is_other_plain(spec)]
    default = yardsticks(recipe, by_default)
    assert states(judged, default)[1] == "fail"
    text = (ROOT / "docs/evidence/parity.md").read_text("utf-8")
    for record in (judged, *(each for each in plain if each not in default)):
        failed = [check for check in verdict.tensor_checks(record, default, recipe) if check.share > 1]
        assert failed
        assert all(f"{100 * check.number:.2f} %" in text for check in failed)
    assert states(judged, plain) == ["pass", "pass"]
    (fourth,) = [each for each in verdict.tensor_checks(judged, plain, recipe)
                 if "layers.4.mlp.experts.lora_A" in each.what and 0.005 < each.number < 0.006]  # fmt: skip
    assert f"(layer 4: {100 * fourth.number:.2f} %, limit {100 * fourth.limit:.2f} %)" in " ".join(text.split())
    damaged = [next(record for spec, record in records(JUDGED / "fastest-moe", control) if spec.method.experts)
               for control in ("gradient_entries_lost", "lora_scale_x1.05")]  # fmt: skip
    assert [states(record, plain)[1] for record in damaged] == ["fail"] * 2
    checks = verdict.tensor_checks(damaged[1], plain, recipe)
    assert f"{sum(each.share > 1 for each in checks)} of {len(checks):,} checks fail" in " ".join(text.split())


def test_the_page_on_verdicts_states_how_often_plain_runs_fail():
    text = " ".join((ROOT / "docs/evidence/parity.md").read_text("utf-8").split())
    alone, pairs, worst = [], [], []
    for name in ("fastest-fp8-6f1f69c8", "fastest-full-fp8", "fastest-vision-fp8", "fastest-moe"):
        runs = records(JUDGED / name)
        if name == "fastest-moe":
            runs = [(spec, record) for spec, record in runs if spec.method.experts]
        recipe, plain = next(spec for spec, _ in runs if spec.optimizations.packing), plain_runs(runs)
        assert len(plain) == 3
        shares = {1: [], 2: []}
        for one, count in product(plain, shares):
            for others in combinations([each for each in plain if each is not one], count):
                checks = [*verdict.tensor_checks(one, others, recipe), loss_check(one, others, recipe)]
                shares[count].append(max(each.share for each in checks))
        alone.append(sum(share > 1 for share in shares[1]))
        pairs.append(sum(share > 1 for share in shares[2]))
        worst += shares[2]
    assert "in {} of 6 cases for `fastest-fp8`, in {} of 6 for `fastest-full-fp8`, in {} of 6".format(*alone) in text
    assert f"and in {alone[3]} of 6 for `fastest-experts`" in text
    assert "it fails in {}, {}, {} and {} of 3 cases".format(*pairs) in text
    assert f"is {max(worst):.1f} times its limit (`fastest-full-fp8`)" in text
    assert f"at most {max(share for share in worst if share < max(worst)):.2f} times their limits" in text


def test_the_page_on_verdicts_states_the_verdicts_of_fastest_vision_fp8_with_one_plain_run():
    text = " ".join((ROOT / "docs/evidence/parity.md").read_text("utf-8").split())
    runs = records(JUDGED / "fastest-vision-fp8")
    ((recipe, judged),) = [(spec, record) for spec, record in runs if not is_plain(spec)]
    plain = {spec.measure.round_scale: record for spec, record in runs if spec.measure.round_products}

    def failed(*scales: float) -> list:
        others = [plain[scale] for scale in scales]
        checks = [*verdict.tensor_checks(judged, others, recipe), loss_check(judged, others, recipe)]
        return [check for check in checks if check.share > 1]

    assert [len(failed(scale)) for scale in (1.0, 0.85, 0.7)] == [0, 4, 1]
    assert "passes if only the plain run with scale 1 sets the limits" in text
    assert "It fails four checks with the limits of scale 0.85, and one check with the limits of scale 0.7" in text
    (one,) = failed(0.85, 0.7)
    assert f"of these two plain runs ({100 * one.number:.1f} %, limit {100 * one.limit:.1f} %)" in text
    changes = [each for each in verdict.tensor_checks(judged, [*plain.values()], recipe)
               if "weight change norm" in each.what and "median" not in each.what]  # fmt: skip
    (worst,) = [each for each in changes if "layers.9.mlp.gate_proj.lora_A" in each.what and each.number > 0.02]
    assert f"is now {100 * worst.number:.1f} % smaller" in text
    assert f"its limit is {100 * worst.limit:.0f} %" in text
    assert f"weight changes go up to {100 * max(each.limit for each in changes):.0f} %" in text
    there = sorted(100 * abs(row[4]) for record in plain.values() for row in record["tensors"]
                   if row[:2] == ["trained", "steps"] and row[2] in worst.what)  # fmt: skip
    assert "({:.1f} %, {:.1f} % and {:.1f} %)".format(*there) in text


def loss_check(record: dict, others: list[dict], recipe: Experiment):
    level = verdict.forward(record, others, recipe)
    return verdict._Check(level.sentence, level.number, level.limit)


def test_the_page_on_verdicts_states_the_errors_of_fastest_full_fp8():
    text = " ".join((ROOT / "docs/evidence/parity.md").read_text("utf-8").split())
    runs = records(JUDGED / "fastest-full-fp8")
    ((spec, record),) = [(spec, record) for spec, record in runs if not is_plain(spec)]
    plain = yardsticks(spec, runs)
    losses = [math.dist(*each["losses"]["initial after"]) / len(each["losses"]["initial after"][0]) ** 0.5
              for each in (record, *plain)]  # fmt: skip
    assert f"{losses[0]:.3f} nats, and those of the plain runs are " in text
    assert "{:.3f}, {:.3f} and {:.3f}".format(*sorted(losses[1:])) in text
    error, *errors = directions([record, *plain], "initial", "gradient")
    assert f"initial weights {error:.3f}, plain runs: {min(errors):.3f} to {max(errors):.3f})" in text
    error, *errors = directions([record, *plain], "trained", "steps")
    assert {f"exact ({error:.3f}, plain runs: {each:.3f})" in text for each in errors} == {True}
    runs = records(JUDGED / "fastest-full")
    (both,) = [(record, *yardsticks(spec, runs)) for spec, record in runs if not is_plain(spec)]
    assert "without 8-bit products ({:.2f}, plain run: {:.2f})".format(*directions(both, "trained", "steps")) in text


def directions(runs, point, change):
    """Return the median direction error of each run at a point."""
    return [statistics.median(row[3] for row in each["tensors"] if row[:2] == [point, change]) for each in runs]


def test_the_page_on_verdicts_states_the_errors_of_the_check_that_did_not_end():
    text = " ".join((ROOT / "docs/evidence/parity.md").read_text("utf-8").split())
    (recipe,) = json.loads((JUDGED / "fastest-fp8-6f1f69c8/parity.json").read_text())["recipes"]
    assert [each["state"] for each in recipe["controls"][:2]] == ["caught"] * 2
    runs = records(JUDGED / "fastest-fp8-6f1f69c8")
    ((spec, record),) = [(spec, record) for spec, record in runs if not is_plain(spec)]
    for found in (level(record, yardsticks(spec, runs), spec) for level in (verdict.forward, verdict.gradient)):
        assert f"{found.number:.2g} / {found.limit:.2g}" in text


@pytest.mark.parametrize(("factor", "state"), [(0.0, "pass"), (0.02, "fail"), (-0.03, "fail")])
def test_another_clipping_factor_fails_beyond_its_rounding(factor, state):
    """Clipping multiplies all second moments by one factor. Change it in a run of a recipe with 16-bit gradients."""
    runs = records(JUDGED / "fastest-full")
    spec, record = deepcopy(next((spec, record) for spec, record in runs if not is_plain(spec)))
    for row in record["tensors"]:
        row[4] += factor * (row[1] == "moment")
    assert verdict.gradient(record, yardsticks(spec, runs), spec).state == state


@pytest.mark.parametrize(
    ("changes", "direction", "factor"),
    [
        (("gradient", "moment"), 2.0, 1.0),  # the opposite direction
        (("gradient", "moment"), 2**0.5, 1.0),  # an unrelated direction
        (("gradient", "moment"), None, 1.5),
        (("gradient", "moment"), None, 0.5),
        (("step", "steps"), None, 1.2),
    ],
)
@pytest.mark.parametrize("index", [0, 1])
def test_wrong_tensor_fails_even_if_rounding_errors_are_large(index, changes, direction, factor):
    """In a model with the size of Qwen3-8B and random weights, some tensors of plain training have direction errors of
    0.8 with 8-bit products."""
    runs = records(ROOT / "results/h200/parity/large/fastest")
    spec, record = deepcopy([(spec, record) for spec, record in runs if not is_plain(spec)][index])
    assert verdict.gradient(record, yardsticks(spec, runs), spec).state == "pass"
    for row in record["tensors"]:
        if row[1] in changes and ".layers.5.self_attn.v_proj.lora_B" in row[2]:
            row[3:] = [row[3] if direction is None else direction, row[4] + math.log(factor)]
    assert verdict.gradient(record, yardsticks(spec, runs), spec).state == "fail"


@pytest.mark.parametrize(
    ("index", "factor", "least", "most"), [(0, 1.1, 0.9, 1.0), (1, 1.5, 0.7, 1.0), (1, 1.25, 0.0, 0.1)]
)
def test_how_many_wrong_tensors_fail(index, factor, least, most):
    """The shares in docs/explanation/verdicts.md: change the gradient of one tensor of a recipe in 16 or 8 bits."""
    runs = records(ROOT / "results/h200/parity/large/fastest")
    spec, record = [(spec, record) for spec, record in runs if not is_plain(spec)][index]
    allowed, changed = yardsticks(spec, runs), ("gradient", "moment")
    names = sorted({row[2] for row in record["tensors"] if row[1] == "gradient"})[::32]
    failed = 0
    for name in names:
        rows = [
            [*row[:4], row[4] + math.log(factor) * (row[1] in changed and row[2] == name)] for row in record["tensors"]
        ]
        failed += verdict.gradient(record | {"tensors": rows}, allowed, spec).state == "fail"
    assert least <= failed / len(names) <= most
