"""The current limits give the verdicts of results/*/parity, with the plain runs that each check used."""

import json
import math
import re
import statistics
from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy
import pytest

from ftbench.spec.experiment import Experiment
from ftbench.store.steps import read_steps
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
    return spec.method.name != "unsloth" and not (on.chunked_loss or on.compile or on.packing or on.weight_offload)


def is_judged(spec: Experiment) -> bool:
    """Return whether a run belongs to a recipe. Some plain runs have eager attention or compiled layers."""
    switched_on = {name for name, value in spec.optimizations if value not in OFF}
    return not is_plain(spec) and not set() < switched_on <= {"attention", "compile"}


def yardsticks(judged: Experiment, runs: list[tuple[Experiment, dict]]) -> list[dict]:
    """Return the plain runs in the precision of a judged run, which set its limits."""
    fp8 = judged.optimizations.fp8 != "off"
    return [record for spec, record in runs if not is_judged(spec) and spec.train.precision == judged.train.precision
            and spec.measure.round_products == fp8 and spec.method.quantised == judged.method.quantised]  # fmt: skip


def optimizations(names: Iterable[str]) -> frozenset[str]:
    """Return what distinguishes the recipes of a folder: their optimizations, without the kernel of the attention."""
    return frozenset(names) - {"attention"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: "-".join(path.parts[-4:]))
def test_committed_verdicts_follow_from_the_recorded_errors(folder):
    runs = records(folder)
    judged = [(spec, record) for spec, record in runs if is_judged(spec)]
    kept = {optimizations(recipe["settings"]["optimizations"].split()): recipe["levels"]
            for recipe in json.loads((folder / "parity.json").read_text())["recipes"]}  # fmt: skip
    assert len(kept) == len(judged)
    names = [optimizations(name for name, value in spec.optimizations if value not in OFF) for spec, _ in judged]
    states = []
    for level in (verdict.forward, verdict.gradient):
        found = [level(record, yardsticks(spec, runs), spec) for spec, record in judged]
        assert [each.state for each in found] == [kept[each][level.__name__]["state"] for each in names]
        states += [each.state for each in found]
    checks = [each for spec, record in judged for each in verdict.tensor_checks(record, yardsticks(spec, runs), spec)]
    if {*states} == {"pass"}:  # correct recipes stay away from the limits
        assert max(each.share for each in checks if ": median" not in each.what) <= 0.9


def page() -> str:
    """Return the text of the page on verdicts in one line."""
    return " ".join((ROOT / "docs/evidence/parity.md").read_text("utf-8").split())


def test_the_page_on_verdicts_names_the_cards_and_commits():
    for folder in ROOT.glob("results/h?00/parity/judged/*/"):
        machines = [json.loads(path.read_text()) for path in folder.glob("*/machine.json")]
        ((card, commit),) = {(each["gpus"][0]["uuid"][:12], each["ftbench"]["commit"][:8]) for each in machines}
        assert card in page(), folder
        assert f"commit {commit}" in page(), folder


def failed_checks(record: dict, others: Iterable[dict], recipe: Experiment) -> list:
    """Return the failed checks of the forward and gradient levels with limits from `others`."""
    checks = [*verdict.tensor_checks(record, [*others], recipe), loss_check(record, [*others], recipe)]
    return [check for check in checks if check.share > 1]


def with_experts(name: str) -> tuple[Experiment, dict, dict[str, dict]]:
    """Return the run of a recipe for a mixture of experts, and its plain runs by what differs in them."""
    runs = [(spec, record) for spec, record in records(JUDGED / name) if spec.train.precision == "bf16"]
    ((recipe, judged),) = [(spec, record) for spec, record in runs if is_judged(spec)]
    plain = {"compiled" if spec.optimizations.compile else "eager" if spec.optimizations.attention == "eager"
             else "default": record for spec, record in runs if not is_judged(spec)}  # fmt: skip
    return recipe, judged, plain


def test_the_page_on_verdicts_states_which_plain_runs_the_verdicts_with_experts_depend_on():
    recipe, judged, plain = with_experts("fastest-moe")
    names = [each for count in (1, 2, 3) for each in combinations(plain, count)]
    failed = {each: failed_checks(judged, [plain[name] for name in each], recipe) for each in names}
    assert all(len(found) == 2 * ("compiled" in each) for each, found in failed.items() if len(each) < 3)
    assert {found.what for each in failed.values() for found in each} == {
        f"layer 6: median {change} norm at trained weights" for change in ("gradient", "second moment")
    }
    alone = failed[("compiled",)][0]
    (worst,) = [each for each in verdict.tensor_checks(judged, [*plain.values()], recipe) if each.what == alone.what]
    assert f"layer 6 is {100 * worst.number:.2f} % (limit {100 * worst.limit:.2f} %)" in page()
    assert f"only the plain run with compiled layers ({100 * alone.limit:.2f} %)" in page()
    cases = (("fastest-gpt-oss", (0, 0)), ("fastest-experts-gpt-oss", (1, 4)), ("fastest-experts-moe", (0, 0, 0)))
    for name, failures in cases:
        recipe, judged, plain = with_experts(name)
        each = ("default", "compiled", "eager")[: len(failures)]
        assert tuple(len(failed_checks(judged, [plain[one]], recipe)) for one in each) == failures
    assert "recipe passes with the limits of each of its three plain runs" in page()
    assert "limits of only the default plain run, and four checks with those of the plain run with compiled" in page()


def of_recipe(name: str, fp8: bool) -> tuple[Experiment, dict, list[dict]]:
    """Return the run of a recipe with or without 8-bit products, and the plain runs that set its limits."""
    runs = records(JUDGED / name)
    ((spec, record),) = [(spec, record) for spec, record in runs
                         if is_judged(spec) and (spec.optimizations.fp8 != "off") == fp8]  # fmt: skip
    return spec, record, yardsticks(spec, runs)


def held_out(name: str, fp8: bool = False) -> dict[str, list[float]]:
    """Return the held-out losses of a check's trainings, without the recipes that have other products than `fp8`."""
    found: dict[str, list[float]] = {"fp32": [], "bf16": [], "untrained": [], "control": []}
    controls = ("layer_gradient_reversed", "learning_rate_x0.1")
    kinds = {"off": "", "learning_rate_0": "untrained"} | dict.fromkeys(controls, "control")
    for path in sorted((JUDGED / name).glob("*/summary.json"), key=seed_of):
        spec = json.loads(path.with_name("spec.json").read_text())
        loss, control = json.loads(path.read_text())["loss"].get("eval"), spec["measure"]["control"]
        other = spec["train"]["precision"] == "bf16" and (spec["optimizations"]["fp8"] != "off") != fp8
        if loss and control in kinds and not other:
            found[kinds[control] or spec["train"]["precision"]].append(loss)
    assert [*map(len, found.values())] == [3, 3, 1, 3]
    return found


def seed_of(path: Path) -> tuple[int, int]:
    spec = json.loads(path.with_name("spec.json").read_text())
    return spec["train"]["seed"], spec["dataset"]["seed"]


def test_the_page_on_verdicts_states_the_losses_of_full_recipes():
    found = held_out("fastest-full")
    assert f"`full` reference by {found['untrained'][0] - statistics.mean(found['fp32']):.1f} nats" in page()
    worse = [one - two for one, two in zip(found["control"], found["fp32"], strict=True)]
    assert f"its held-out loss is {min(worse):.2f} to {max(worse):.2f} nats higher" in page()


def test_the_page_on_verdicts_states_the_losses_with_experts():
    fallen: dict[str, list[float]] = {"Qwen3-MoE": [], "gpt-oss": []}
    worse = {}
    for name in ("fastest-moe", "fastest-experts-moe", "fastest-gpt-oss", "fastest-experts-gpt-oss"):
        found = held_out(name)
        model = "gpt-oss" if "gpt-oss" in name else "Qwen3-MoE"
        fallen[model].append(found["untrained"][0] - statistics.mean(found["fp32"]))
        (recipe,) = json.loads((JUDGED / name / "parity.json").read_text())["recipes"]
        ends = re.findall(r"[-+][\d.]+", recipe["levels"]["training"]["sentence"])
        assert f"{' to '.join(ends)} nats (`{recipe['name']}`, {model})" in page()
        worse[name] = statistics.mean(found["control"]) - statistics.mean(found["fp32"])
    one, two, three, four = worse.values()
    assert f"the reference by {one:.2f} and {two:.2f} nats (`fastest` and `fastest-experts`, Qwen3-MoE)" in page()
    assert f"and by {three:.2f} and {four:.2f} nats (gpt-oss)" in page()
    (one, two), (three, four) = map(sorted, fallen.values())
    assert f"(Qwen3-MoE: {one:.1f} to {two:.1f} nats, gpt-oss: {three:.1f} to {four:.1f} nats)" in page()


def test_the_page_on_verdicts_states_the_losses_of_short_trainings():
    worse, sentences = {}, {}
    losses = {}
    for name, steps in (("fastest-experts-moe", 15), ("fastest-vision", 20), ("fastest-vision-fp8", 20),
                        ("packed-vision", 20), ("unpacked-vision", 20)):  # fmt: skip
        found = held_out(name, name.endswith("fp8"))
        level = verdict.training(found["fp32"], found["bf16"], found["untrained"][0], steps)
        (recipe,) = json.loads((JUDGED / name / "parity.json").read_text())["recipes"]
        assert (level.state, level.sentence) == ("pass", recipe["levels"]["training"]["sentence"])
        control = verdict.training(found["fp32"], found["control"], found["untrained"][0], steps)
        assert control.state == "fail"
        worse[name] = [one - two for one, two in zip(found["control"], found["fp32"], strict=True)]
        sentences[name] = " to ".join(re.findall(r"[-+]?[\d.]+(?= to| nats)", level.sentence))
        losses[name] = found["bf16"]
    assert f"{sentences['fastest-vision'].replace('+', '')} nats higher than those of the reference" in page()
    for name in ("fastest-vision-fp8", "packed-vision"):
        assert f"(`{name}`: {sentences[name].replace('+', '')} nats)" in page()
    assert f"from the reference by {sentences['unpacked-vision']} nats (`unpacked-vision`)" in page()
    higher = [one - two for one, two in zip(losses["packed-vision"], losses["fastest-vision"], strict=True)]
    assert f"loss is only {min(higher):.3f} to {max(higher):.3f} nats higher than that of `fastest-vision`" in page()
    found = held_out("fastest-vision")
    fallen = found["untrained"][0] - statistics.mean(found["fp32"])
    assert f"and of the image reference by {fallen:.1f} nats" in page()
    least, *_, most = sorted(worse["fastest-vision"] + worse["fastest-vision-fp8"])
    assert f"loss of the control with a reversed gradient is {least:.2f} to {most:.2f} nats higher than" in page()
    assert f"the control is {statistics.mean(worse['fastest-experts-moe']):.2f} nats worse" in page()


def test_the_page_on_verdicts_states_how_many_samples_short_trainings_had():
    trained: dict[str, dict[bool, set[float]]] = {}  # folder → is a recipe → numbers
    steps: set[float] = set()  # samples per step of the recipes for images
    for path in JUDGED.glob("*/*/summary.json"):
        spec = json.loads(path.with_name("spec.json").read_text())
        if spec["train"]["max_steps"] in (15, 20) and not spec["measure"]["gradients"]:
            rows = read_steps(path.with_name("steps.csv"))[0]
            count = sum(row.samples for row in rows if row.phase == "train")
            numbers = trained.setdefault(path.parts[-3], {True: set(), False: set()})
            numbers[bool(spec["optimizations"]["packing"])].add(count)
            if spec["dataset"]["name"] == "images" and spec["optimizations"]["packing"]:
                steps |= {row.samples for row in rows if row.phase == "train"}
    for name, count in (("fastest-moe", 1280), ("fastest-gpt-oss", 1280), ("fastest-experts-gpt-oss", 1280),
                        ("fastest-experts-moe", 960), ("fastest-vision", 320), ("fastest-vision-fp8", 320),
                        ("packed-vision", 320)):  # fmt: skip
        assert trained.pop(name) == {True: {count}, False: {count}}
    assert trained.pop("unpacked-vision") == {True: set(), False: {320}}
    assert "The numbers of samples are equal (1,280 or 960)" in page()
    assert "the recipes for images and all references trained 320 samples" in page()
    assert {*trained} == {"fastest-full"}
    assert trained["fastest-full"][False] == {320}
    assert f"A step of the packed recipes has {min(steps):.0f} to {max(steps):.0f} samples, and a step of" in page()
    least, *_, most = sorted(set.union(*(numbers[True] for numbers in trained.values())))
    assert f"`fastest-full` and `fastest-full-fp8` trained {least:.0f} to {most:.0f}" in page()


@pytest.mark.parametrize("name", ["fastest-moe", "fastest-experts-moe", "fastest-gpt-oss", "fastest-experts-gpt-oss"])
def test_controls_fail_with_experts(name):
    recipe, _, plain = with_experts(name)
    for level, control in ((verdict.forward, "lora_scale_x1.5"), (verdict.gradient, "gradient_entries_lost")):
        ((_, record),) = records(JUDGED / name, control)
        assert level(record, [*plain.values()], recipe).state == "fail"


def test_the_page_on_verdicts_states_how_often_plain_runs_fail():
    labels = {
        "fastest": "`fastest-fp8`", "fastest-full": "`fastest-full-fp8`", "fastest-vision-fp8": "`fastest-vision-fp8`",
        "fastest-moe": "`fastest`, Qwen3-MoE", "fastest-experts-moe": "`fastest-experts`, Qwen3-MoE",
        "fastest-gpt-oss": "`fastest`, gpt-oss", "fastest-experts-gpt-oss": "`fastest-experts`, gpt-oss",
    }  # fmt: skip
    for name, label in labels.items():
        recipe, _, plain = of_recipe(name, fp8="-moe" not in name and "gpt-oss" not in name)
        row = f"| {label}"
        for count in (1, 2):
            shares = []
            for one in plain:
                for others in combinations([each for each in plain if each is not one], count):
                    checks = [*verdict.tensor_checks(one, others, recipe), loss_check(one, others, recipe)]
                    shares.append(max(each.share for each in checks))
            failed = sum(share > 1 for share in shares)
            row += f" | {failed} of {len(shares)} ({max(shares):.2f})" if shares else " |"
        assert f"{row} |" in page()


@pytest.mark.parametrize("name", ["fastest", "fastest-full", "fastest-vision-fp8"])
def test_the_page_on_verdicts_states_which_plain_runs_the_verdicts_of_fp8_recipes_depend_on(name):
    recipe, judged, _ = of_recipe(name, fp8=True)
    plain = {spec.measure.round_scale: record for spec, record in records(JUDGED / name) if spec.measure.round_products}
    sets = [each for count in (1, 2, 3) for each in combinations(sorted(plain), count)]
    failed = {each: failed_checks(judged, [plain[scale] for scale in each], recipe) for each in sets}
    assert all(failed[each] == [] for each in sets if name == "fastest" or 0.7 in each)
    assert "the passes of `fastest-full-fp8` and `fastest-vision-fp8` depend on the plain run with scale 0.7" in page()
    counts = tuple(len(failed[each]) for each in ((0.85,), (1.0,), (0.85, 1.0)))
    assert counts == {"fastest": (0, 0, 0), "fastest-full": (1, 1, 1), "fastest-vision-fp8": (2, 1, 1)}[name]
    if name == "fastest-vision-fp8":
        (both,) = failed[0.85, 1.0]
        assert both.what.endswith("layers.9.mlp.gate_proj.lora_A.default.weight: weight change norm at trained weights")
        size = f"{100 * both.number:.2f} % smaller than in the reference"
        limit = f"(limit from the two other runs: {100 * both.limit:.2f} %)"
        assert f"the weight change of `layers.9.mlp.gate_proj.lora_A` is {size} {limit}" in page()
        ((_, sign),) = [row[3:] for row in judged["tensors"] if row[:2] == ["trained", "steps"] and row[2] in both.what]
        assert sign == -both.number
        changes = [each for each in verdict.tensor_checks(judged, [*plain.values()], recipe)
                   if "weight change norm" in each.what and "median" not in each.what]  # fmt: skip
        assert f"limits go up to {100 * max(each.limit for each in changes):.0f} %" in page()


def test_the_page_on_verdicts_states_that_a_correct_run_failed():
    recipe, record, plain = of_recipe("packed-vision", fp8=False)
    (failed,) = failed_checks(record, plain, recipe)
    count = len(verdict.tensor_checks(record, plain, recipe)) + 1
    assert f"fails one of {count:,} checks: the weight change of one matrix of adapters" in page()
    assert failed.what.endswith("lora_A.default.weight: weight change norm at trained weights")
    ((_, sign),) = [row[3:] for row in record["tensors"] if row[:2] == ["trained", "steps"] and row[2] in failed.what]
    assert sign == failed.number
    assert f"{100 * failed.number:.2f} % larger than in the reference (limit {100 * failed.limit:.2f} %)" in page()
    assert len(plain) == 1


def loss_check(record: dict, others: list[dict], recipe: Experiment):
    level = verdict.forward(record, others, recipe)
    return verdict._Check(level.sentence, level.number, level.limit)


def test_the_page_on_verdicts_states_the_errors_of_fastest_full_fp8():
    _, record, plain = of_recipe("fastest-full", fp8=True)
    losses = [math.dist(*each["losses"]["initial after"]) / len(each["losses"]["initial after"][0]) ** 0.5
              for each in (record, *plain)]  # fmt: skip
    assert f"{losses[0]:.3f} nats, and those of the plain runs are " in page()
    assert "{:.3f}, {:.3f} and {:.3f}".format(*sorted(losses[1:])) in page()
    error, *errors = directions([record, *plain], "initial", "gradient")
    assert f"initial weights {error:.3f}, plain runs: {min(errors):.3f} to {max(errors):.3f})" in page()
    error, *errors = directions([record, *plain], "trained", "steps")
    assert f"exact ({error:.3f}, plain runs: {min(errors):.3f} to {max(errors):.3f})" in page()
    _, record, plain = of_recipe("fastest-full", fp8=False)
    errors = directions([record, *plain], "trained", "steps")
    assert "without 8-bit products ({:.2f}, plain run: {:.2f})".format(*errors) in page()


def directions(runs, point, change):
    """Return the median direction error of each run at a point."""
    return [statistics.median(row[3] for row in each["tensors"] if row[:2] == [point, change]) for each in runs]


@pytest.mark.parametrize("fp8", [False, True])
def test_the_page_on_verdicts_states_the_weight_change_of_the_output_layer(fp8):
    spec, record, plain = of_recipe("fastest-full", fp8)
    (row,) = [row for row in record["tensors"] if row[:3] == ["trained", "step", "lm_head.weight"]]
    assert f"In the runs of the table, it is {100 * math.expm1(row[4]):.0f} % larger, too, for both" in page()
    along = math.exp(row[4]) * (1 - row[3] ** 2 / 2)
    ((lower, upper),) = re.findall(r"here it is ([\d.]+) to ([\d.]+) % larger", page())
    assert f"{100 * (along - 1):.1f}" in (lower, upper)
    assert spec.train.optimizer == "adamw_torchao_bf16"
    nearest = spec.model_copy(update={"train": spec.train.model_copy(update={"optimizer": "adamw_torch"})})
    failed = [each for each in verdict.tensor_checks(record, plain, nearest) if each.share > 1]
    assert [each.what for each in failed] == ["lm_head.weight: weight change norm at trained weights"]
    assert f"(limit {100 * math.expm1(failed[0].limit):.0f} %)" in page()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("points", "tensor", "passing", "failing"), [
    ("initial trained", "", (1.0,), (0.95, 1.05)),
    ("trained", "", (0.93, 1.07), (0.9, 1.1)),
    ("trained", "lm_head", (0.65, 1.15), (0.6, 1.2)),
])  # fmt: skip
def test_wrong_weight_changes_fail_although_random_rounding_does_not(fp8, points, tensor, passing, failing):
    """The sizes of docs/evidence/parity.md."""
    spec, record, plain = of_recipe("fastest-full", fp8)
    for factor in (*passing, *failing):
        rows = deepcopy(record["tensors"])
        for row in rows:
            row[4] += math.log(factor) * (row[1] in ("step", "steps") and row[0] in points and tensor in row[2])
        found = verdict.gradient(record | {"tensors": rows}, plain, spec)
        assert (factor, found.state) == (factor, "pass" if factor in passing else "fail")


def test_unrelated_weight_change_fails_also_in_the_output_layer():
    spec, record, plain = deepcopy(of_recipe("fastest-full", fp8=False))
    for row in record["tensors"]:
        if row[:3] == ["trained", "steps", "lm_head.weight"]:
            row[3] = 2**0.5
    assert verdict.gradient(record, plain, spec).state == "fail"


def test_stochastic_rounding_makes_a_weight_change_longer_but_not_its_part_along_the_reference():
    random = numpy.random.default_rng(0)
    change = random.normal(size=200_000) * 0.3  # in units of the last bit of a weight
    rounded = numpy.floor(change + random.random(change.size))
    length, scale = numpy.linalg.norm(rounded), numpy.linalg.norm(change)
    direction = numpy.linalg.norm(rounded / length - change / scale)
    row = ["trained", "step", "lm_head.weight", direction, math.log(length / scale)]
    for stochastic, least, most in ((False, 0.4, 0.6), (True, 0.0, 0.01)):
        errors = verdict._errors([{"tensors": [row]}], stochastic)
        assert least <= errors["trained", "step", "norm"]["lm_head.weight"] <= most


@pytest.mark.parametrize(("factor", "state"), [(0.0, "pass"), (0.02, "fail"), (-0.03, "fail")])
def test_another_clipping_factor_fails_beyond_its_rounding(factor, state):
    """Clipping multiplies all second moments by one factor. Change it in a run of a recipe with 16-bit gradients."""
    spec, record, plain = deepcopy(of_recipe("fastest-full", fp8=False))
    for row in record["tensors"]:
        row[4] += factor * (row[1] == "moment")
    assert verdict.gradient(record, plain, spec).state == state


@pytest.mark.parametrize(
    ("changes", "direction", "factor"),
    [
        (("gradient", "moment"), 2**0.5, 1.0),  # an unrelated direction
        (("gradient", "moment"), None, 1.5),
        (("step", "steps"), None, 1.2),
    ],
)
@pytest.mark.parametrize("index", [0, 1])
def test_wrong_tensor_fails_even_if_rounding_errors_are_large(index, changes, direction, factor):
    """In a model with the size of Qwen3-8B and random weights, some tensors of plain training have direction errors of
    0.8 with 8-bit products. Without a change, both recipes pass."""
    runs = records(ROOT / "results/h200/parity/large/fastest")
    spec, record = [(spec, record) for spec, record in runs if not is_plain(spec)][index]
    rows = deepcopy(record["tensors"])
    for row in rows:
        if row[1] in changes and ".layers.5.self_attn.v_proj.lora_B" in row[2]:
            row[3:] = [row[3] if direction is None else direction, row[4] + math.log(factor)]
    assert verdict.gradient(record | {"tensors": rows}, yardsticks(spec, runs), spec).state == "fail"


@pytest.mark.parametrize(
    ("index", "factor", "least", "most"), [(0, 1.1, 0.9, 1.0), (1, 1.5, 0.7, 1.0), (1, 1.25, 0.0, 0.1)]
)
def test_how_many_wrong_tensors_fail(index, factor, least, most):
    """The shares in docs/explanation/verdicts.md: change the gradients of a recipe in 16 or 8 bits. The limits of a
    tensor do not depend on the errors of the others."""
    runs = records(ROOT / "results/h200/parity/large/fastest")
    spec, record = [(spec, record) for spec, record in runs if not is_plain(spec)][index]
    rows = [[*row[:4], row[4] + math.log(factor) * (row[1] in ("gradient", "moment"))] for row in record["tensors"]]
    names = {row[2] for row in rows}
    checks = verdict.tensor_checks(record | {"tensors": rows}, yardsticks(spec, runs), spec)
    failed = names & {each.what.partition(":")[0] for each in checks if each.share > 1}
    assert least <= len(failed) / len(names) <= most
