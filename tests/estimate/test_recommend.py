"""Recommendations: all options can run, fit and meet the limits; the best is first; others have a reason."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from commands import printed_command, typed_spec
from counting import calls_of
from ftbench.core.hardware import capability_of, gpus
from ftbench.errors import SpecError
from ftbench.estimate.memory.estimate import estimate_memory
from ftbench.estimate.memory.largest_batch import MemoryCache, with_batch
from ftbench.estimate.recommend import candidates
from ftbench.estimate.recommend import request as requests
from ftbench.estimate.recommend.ranking import Goal, Recommendation, as_runnable, recommend, samples_per_step
from ftbench.estimate.recommend.spec_file import run_command, variant_words
from ftbench.estimate.recommend.spec_file import spec_file as written_spec
from ftbench.estimate.recommend.text import as_json, as_text, as_yaml
from ftbench.estimate.time.duration import estimate_duration
from ftbench.estimate.time.history import RunHistory
from ftbench.spec.experiment import Experiment, resolve
from ftbench.spec.incompatibilities import incompatibilities, machine_incompatibilities
from ftbench.spec.load import load, recipe, recipes
from ftbench.spec.model_argument import spec_sets
from ftbench.spec.optimizations import Optimizations
from ftbench.spec.prices import load_prices

ROOT = Path(__file__).resolve().parents[2]
SPEC = {"name": "night", "model": {"id": "Qwen/Qwen3-8B", "weights": "random"}, "method": {"name": "lora", "rank": 16},
        "dataset": {"name": "japanese-alpaca"}, "train": {"precision": "bf16", "learning_rate": 1e-4}}  # fmt: skip
GPUS = {gpu.name: gpu for gpu in gpus()}
STORE = RunHistory.read(ROOT / "results" / "h200")


ASKED: dict[str, Recommendation] = {}


def ask(*names: str, spec: dict | None = None, samples: float = 1e6, **limits: object) -> Recommendation:
    """Return the recommendation, computed once for all tests that ask for it."""
    if (key := repr((names, spec, samples, limits))) not in ASKED:
        chosen = tuple(GPUS[name] for name in names or ("H200 SXM",))
        experiment = Experiment.model_validate({**SPEC, **(spec or {})})
        ASKED[key] = recommend(Goal(experiment, chosen, samples, history=STORE, **limits))  # type: ignore[arg-type]
    return ASKED[key]


@pytest.fixture
def spec_file(tmp_path):
    path = tmp_path / "night.yaml"
    path.write_text(json.dumps({key: value for key, value in SPEC.items() if key != "name"}))
    return path


# --- the options -----------------------------------------------------------------------------------------------------


def test_gpt_oss_keeps_its_published_4_bits():
    """Its published weights cannot be quantized again, and unsloth ignores `load_in_4bit`."""
    found = ask("RTX 4090", spec={"model": {"id": "openai/gpt-oss-20b"}}).options
    methods = [option.spec.method for option in found]
    assert found[0].spec.method.mxfp4
    assert all(method.quantised for method in methods if method.name != "lora")


def test_every_option_can_run_on_its_gpu_fits_and_meets_the_deadline():
    names = ("RTX 4090", "A100 40GB", "H100 SXM5", "MI300X")
    found = ask(*names, deadline_s=40 * 3600)
    assert {option.gpu.name for option in found.options} <= set(names)
    assert len(found.options) + sum(found.ruled_out.values()) == found.considered
    for option in found.options:
        assert not incompatibilities(option.spec)
        assert not machine_incompatibilities(option.spec, capability_of(option.gpu))
        assert option.memory.verdict == "fits"
        assert option.seconds.expected <= 40 * 3600
        assert option.duration == estimate_duration(option.spec, option.gpu, STORE)
    assert not any(o.spec.optimizations.fp8 != "off" and o.gpu.name == "A100 40GB" for o in found.options)


@pytest.mark.parametrize(("objective", "figure"), [
    ("speed", lambda option: option.seconds.expected), ("energy", lambda option: option.joules.expected),
    ("memory", lambda option: option.memory.device.expected), ("cost", lambda option: option.cost.value),
])  # fmt: skip
def test_options_are_sorted_by_the_goal(objective, figure):
    prices = load_prices(ROOT / "configs" / "prices-example.yaml")
    options = ask(objective=objective, methods=("qlora",), prices=prices, deadline_s=24 * 3600).options
    assert len(options) > 20
    order = [(option.seconds.high > 24 * 3600, figure(option)) for option in options]
    assert order == sorted(order)


def test_different_variants_have_different_names():
    names = [variant_words(option.spec) for option in ask("L40S", samples=20_000, methods=("qlora",)).options]
    assert len(names) > 20
    assert sorted(names) == sorted(set(names))


def test_shipped_recipes_are_considered():
    found = [way.spec for way in candidates.variants(Experiment.model_validate(SPEC), ("lora", "qlora", "full"), False)]
    for name in recipes():
        asked = recipe(name, Path())
        if asked["optimizations"].get("image_cache"):
            continue  # for images (test_image_estimates.py)
        on = Optimizations.model_validate(asked["optimizations"])
        method = asked.get("method", {}).get("name", "lora")
        alike = [each for each in found if each.optimizations == on and each.method.name == method]
        assert any(each.train.optimizer == asked["train"]["optimizer"] for each in alike), name
        assert all(getattr(each.method, "rank", 16) == 16 and each.train.learning_rate == 1e-4 for each in alike)
    assert {True, False} == {each.optimizations.fused_lora for each in found}


def test_our_kernels_are_offered_for_supported_models():
    found = ask()
    on = [option.spec.optimizations for option in found.options]
    assert {"off", "tensorwise-delayed"} <= {each.fp8 for each in on if each.triton_kernels}
    assert found.options[0].spec.optimizations.triton_kernels
    other = ask(spec={"model": {"id": "openai/gpt-oss-20b", "weights": "random"}})
    assert other.options
    ran = [resolve(option.spec, (9, 0)) for option in other.options]
    assert not any(spec.optimizations.triton_kernels for spec in ran)
    trained = [(spec.method, spec.optimizations, spec.train.optimizer) for spec in ran]
    assert len(set(trained)) == len(trained)


def test_methods_with_the_same_matrices_are_the_default():
    assert {option.spec.method.name for option in ask().options} == {"lora", "qlora", "unsloth"}
    assert {option.spec.method.rank for option in ask().options} == {16}
    assert {option.spec.method.name for option in ask(spec={"method": {"name": "full"}}).options} == {"full"}
    assert {option.spec.method.name for option in ask(methods=("full", "qlora")).options} == {"full", "qlora"}


def test_accumulation_keeps_the_effective_batch():
    found = ask(effective_batch=48)
    steps = [option.spec.train for option in found.options]
    rows = [option.spec.optimizations.packing for option in found.options]
    held = [train.batch_size * train.gradient_accumulation_steps for train in steps]
    assert {size for size, packed in zip(held, rows, strict=True) if not packed} == {48}
    assert any(rows)
    assert all(option.duration.samples == pytest.approx(48, rel=0.1) for option in found.options)
    assert any(train.gradient_accumulation_steps > 1 for train in steps)


def test_small_steps_are_not_packed():
    found = ask(effective_batch=4)
    assert not any(option.spec.optimizations.packing for option in found.options)
    assert any("packed rows" in reason for reason in found.ruled_out)


@pytest.mark.parametrize(("arguments", "held"), [
    ((), {12}), (("--effective-batch", "32"), {32}), (("--effective-batch", "any"), None),
], ids=str)  # fmt: skip
@pytest.mark.usefixtures("few_ways")
def test_the_specs_effective_batch_is_the_default(ftbench, spec_file, arguments, held):
    asked = ("--gpu", "H200 SXM", "--samples", 5000, "--set", "train.gradient_accumulation_steps=3", *arguments)
    _, out, _ = ftbench("recommend", spec_file, *asked, "--json")
    plain = [option for option in json.loads(out)["options"] if "packing" not in option["optimizations"]]
    steps = {option["batch_size"] * option["gradient_accumulation_steps"] for option in plain}
    assert steps == held if held else len(steps) > 1


@pytest.mark.parametrize(("sets", "held"), [
    ((), {16}), (("--set", "train.batch_size=8"), {8}),
], ids=str)  # fmt: skip
@pytest.mark.usefixtures("few_ways")
def test_a_model_without_a_spec_has_16_samples_per_step_unless_changed(ftbench, sets, held):
    asked = ("--length", 200, "--gpu", "H200 SXM", "--samples", 5000, *sets)
    options = json.loads(ftbench("recommend", "Qwen/Qwen3-0.6B", *asked, "--json")[1])["options"]
    plain = [option for option in options if "packing" not in option["optimizations"]]
    assert {option["batch_size"] * option["gradient_accumulation_steps"] for option in plain} == held


def test_full_training_of_8b_fits_a_small_card_with_a_recipe(ftbench):
    """The recipe cannot clip or accumulate gradients, so a step is one batch."""
    asked = ("--length", 600, "--gpu", "4090", "--samples", 5000, "--method", "full")
    options = json.loads(ftbench("recommend", "Qwen/Qwen3-8B", *asked, "--json")[1])["options"]
    assert {option["recipe"] for option in options} == {"full: smallest-full"}
    assert {(option["batch_size"], option["gradient_accumulation_steps"]) for option in options} == {(16, 1)}


@pytest.mark.usefixtures("few_ways")
def test_shorter_samples_do_not_take_longer(ftbench):
    """Packed rows hold about 16 samples, not exactly 16: at 190 tokens one row holds a third fewer."""
    times = []
    for length in (190, 300, 450, 600):
        asked = ("--length", length, "--gpu", "H100 SXM5", "--samples", 20000)
        best = json.loads(ftbench("recommend", "Qwen/Qwen3-8B", *asked, "--json")[1])["options"][0]
        assert best["optimizations"]["packing"]
        times.append(best["seconds"]["expected"])
    assert times == sorted(times)


@pytest.mark.usefixtures("few_ways")
def test_the_best_by_energy_is_shown_with_its_energy(ftbench):
    asked = ("--length", 600, "--gpu", "H200 SXM,RTX 5090", "--samples", 20000, "--goal", "energy")
    out = ftbench("recommend", "Qwen/Qwen3-8B", *asked)[1]
    rows = [float(number) for number in re.findall(r"^(?:H200|RTX).* ([\d.]+) kWh ", out, re.MULTILINE)]
    assert len(rows) == 2
    assert rows == sorted(rows)
    assert re.search(rf"Best: .* {rows[0]} kWh, ", " ".join(out.split()))


def test_a_batch_that_does_not_fit_in_one_pass_names_the_option(ftbench):
    asked = ("--length", 6000, "--gpu", "4090", "--samples", 5000, "--method", "full")
    out = ftbench("recommend", "Qwen/Qwen3-8B", *asked)[1]
    assert "cannot train 16 samples in one batch or accumulate gradients: lower --effective-batch" in " ".join(
        out.split()
    )
    options = json.loads(ftbench("recommend", "Qwen/Qwen3-8B", *asked, "--effective-batch", 2, "--json")[1])["options"]
    assert [option["batch_size"] for option in options] == [2]


@pytest.mark.usefixtures("few_ways")
def test_a_command_for_all_samples_has_no_number_of_steps(ftbench):
    """The spec has 80 steps. `off` is no number."""
    config = ROOT / "configs" / "llava-next.yaml"
    out = ftbench("recommend", config, "--gpu", "H200 SXM", "--samples", 20000, "--set", "dataset.samples=20000")[1]
    assert typed_spec(printed_command(out)).train.max_steps in (None, 20000 // 4)
    assert "max_steps=off" not in out


@pytest.mark.usefixtures("few_ways")
def test_all_gpus_are_those_on_which_ftbench_trains(ftbench):
    asked = ("--length", 200, "--gpu", "all", "--samples", 5000)
    named = {
        option["gpu"] for option in json.loads(ftbench("recommend", "Qwen/Qwen3-0.6B", *asked, "--json")[1])["options"]
    }
    assert {"RTX 4090", "H200 SXM"} <= named
    assert not [name for name in named if name.startswith("MI")]


@pytest.mark.parametrize(("gpu", "sets"), [
    ("A100 80GB", ["train.batch_size=64", "dataset.max_length=4096"]),
    ("H200 SXM", ["method=full", "train.batch_size=64"]),
], ids=str)  # fmt: skip
def test_a_spec_that_does_not_fit_comes_with_a_command_that_does(ftbench, spec_file, gpu, sets):
    words = [word for value in sets for word in ("--set", value)]
    code, out, _ = ftbench("estimate", spec_file, "--gpu", gpu, "--check", *words)
    assert code != 0
    command = printed_command(out)
    assert Path(command[0]) == spec_file
    code, again, _ = ftbench("estimate", *command, "--gpu", gpu, "--check")
    assert code == 0
    assert "The fastest settings" not in again
    before, after = load(spec_file, sets), typed_spec(command)
    samples = [samples_per_step(spec, RunHistory()) for spec in (before, after)]
    assert samples[0] == pytest.approx(samples[1], rel=0.1)  # packed rows hold about as many


@pytest.mark.parametrize("command", [
    ("recommend",), ("init", "-o", "run.yaml"), ("estimate", "--set", "train.batch_size=4096", "--set", "method=full"),
], ids=lambda words: words[0])  # fmt: skip
@pytest.mark.usefixtures("few_ways")
def test_the_command_for_an_amd_card_is_an_estimate(ftbench, monkeypatch, tmp_path, command):
    monkeypatch.chdir(tmp_path)
    name, *options = command
    data = ["--dataset", "200"] if name == "init" else ["--length", 200]
    out = ftbench(name, "Qwen/Qwen3-8B", "--gpu", "MI300X", *data, "--samples", 9000, *options)[1]
    assert "ftbench run" not in out
    assert "ftbench cannot train on AMD GPUs" in out
    words = shlex.split(out[out.index("  ftbench estimate ") :].replace("\\\n", "").splitlines()[0])
    code, again, _ = ftbench(*words[1:], "--check")
    assert code == 0
    assert "on MI300X: fits" in again


def test_the_settings_that_fit_keep_a_chosen_method(ftbench):
    sets = ("--set", "method=qlora", "--length", 600)
    out = ftbench("estimate", "Qwen/Qwen3-32B", *sets, "--gpu", "H100 SXM5")[1]
    assert "The fastest settings that fit take" in out
    assert typed_spec(printed_command(out)).method.name == "qlora"


@pytest.mark.parametrize("options", [
    ("--gpu", "RTX 5090", "--gpus", 4, "--strategy", "zero2", "--set", "method=full"),
    ("--gpu", "L4,L40S"),
], ids=str)  # fmt: skip
@pytest.mark.usefixtures("few_ways")
def test_the_command_for_several_gpus_fits(ftbench, spec_file, options):
    code, out, _ = ftbench("estimate", spec_file, "--check", *options)
    assert code != 0
    assert "The fastest settings that fit take" in out
    words = printed_command(out)
    where = ("--gpu", "L40S") if options[1] == "L4,L40S" else options[:2]
    code, again, _ = ftbench("estimate", *words, *where, "--check")
    assert code == 0
    assert "The fastest settings" not in again


def test_without_a_fit_no_command_is_printed(ftbench, spec_file):
    data = "dataset={name: synthetic, samples: 100, length: 100000, max_length: 100000}"
    asked = ("estimate", spec_file, "--gpu", "L4", "--set", data, "--set", "method=full")
    _, out, _ = ftbench(*asked)
    assert "that certainly fits" in out
    _, out, _ = ftbench(*asked, "--json")
    assert json.loads(out)["gpus"][0]["nearest"] is None


@pytest.mark.parametrize(("packing", "unit"), [("on", "rows"), ("off", "samples")])
def test_comment_of_a_written_spec_names_what_a_batch_counts(packing, unit):
    spec = load(Path("tiny/qwen3"), [f"optimizations.packing={packing}", "train.batch_size=2"])
    assert f"train: {{batch_size: 2}}  # {unit} per step: batch_size" in written_spec(spec)


def test_equal_lengths_are_packed_for_cuda_graphs_only():
    fixed = {"name": "synthetic", "samples": 512, "length": 1024}
    for on in (option.spec.optimizations for option in ask(spec={"dataset": fixed}).options):
        assert on.packing == (on.cuda_graph is True)


def test_dpo_considers_all_optimizations_except_losses():
    """Almost all shipped recipes have one of these losses; their other optimizations must remain."""
    pairs = {"objective": {"name": "dpo"}, "dataset": {"name": "synthetic", "samples": 512, "length": 512}}
    options = ask(spec=pairs, effective_batch=4).options
    switched = [{name for name, value in option.spec.optimizations if value is not False} for option in options]
    offered = set.union(*switched)
    assert {"compile", "gradient_checkpointing"} <= offered
    assert not {"chunked_loss", "liger"} & offered
    assert ask("RTX 4090", spec=pairs, effective_batch=4).options  # where only checkpoints make room


def test_without_an_option_the_closest_is_named():
    found = ask(deadline_s=60)
    assert not found.options
    assert found.closest is not None
    assert found.closest.seconds.expected == min(option.seconds.expected for option in ask().options)
    assert "later than the deadline" in found.missed
    assert found.ruled_out["later than the deadline"] == len(ask().options)


def test_options_that_may_miss_the_deadline_are_marked_and_come_last():
    """A variant with only its slow end beyond the deadline is kept and ranked last."""
    second = ask().options[1].seconds
    deadline_s = (second.expected + second.high) / 2
    some = ask(deadline_s=deadline_s, objective="memory")
    late = [option.seconds.high > deadline_s for option in some.options]
    assert late == sorted(late)
    assert set(late) == {False, True}
    assert [each["may_miss_deadline"] for each in as_json(some)["options"]] == late
    assert as_text(some, every=True).count(" may miss ") == sum(late)
    assert as_json(ask())["options"][0]["may_miss_deadline"] is None


def test_offloaded_weights_are_named_with_their_host_memory():
    answer = ask("RTX 4090", spec={"model": {"id": "Qwen/Qwen3-235B-A22B"}})
    assert answer.options[0].memory.host > 400
    assert "\nhost memory: about 4" in as_text(answer)
    assert "host memory" not in as_text(ask("RTX 4090"))


def test_lengths_that_only_miss_the_deadline_are_not_said_to_not_fit():
    answer = ask()
    late = replace(answer, lengths=((0.5, None),))
    assert "no variant meets the limits at half the mean length" in " ".join(as_text(late).split())


def test_without_a_fit_the_reasons_are_named():
    data = {"name": "synthetic", "samples": 100, "length": 100_000, "max_length": 100_000}
    found = ask("L4", spec={"dataset": data}, methods=("full",))
    assert (found.options, found.closest) == ((), None)
    assert any(reason.startswith("does not fit at batch 1 on L4") for reason in found.ruled_out)


@pytest.mark.usefixtures("few_ways")
def test_a_budget_rules_out_more_expensive_options():
    prices = load_prices(ROOT / "configs" / "prices-example.yaml")
    free = ask(prices=prices).options
    middle = sorted(option.cost.value for option in free if option.cost)[len(free) // 2]
    assert {option.cost.value <= middle for option in ask(prices=prices, max_cost=middle).options if option.cost} == {
        True
    }


def test_the_largest_batch_is_that_of_the_memory_estimate():
    spec, memory_cache = Experiment.model_validate(SPEC), MemoryCache()
    found = candidates.variants(spec, ("lora", "qlora", "unsloth"), False)
    tried = [variant.spec for variant in found if not variant.problems][::9]
    for name in ("H200 SXM", "A100 40GB", "RTX 4090"):
        for way in tried:
            one = with_batch(way, 1, 1)
            largest = memory_cache.largest_batch(one, GPUS[name])
            assert largest == MemoryCache().largest_batch(one, GPUS[name])
            assert MemoryCache().largest_batch(one, GPUS[name], most=5) == (largest and min(largest, 5))


def test_memory_on_several_gpus_does_not_depend_on_the_order_of_the_cards():
    """The allocator of a full card frees blocks of other streams, so the memory depends on the card."""
    data = {"name": "synthetic", "samples": 64, "length": 2048, "max_length": 2048}
    changes = {
        "method": {"name": "full"},
        "dataset": data,
        "train": {"batch_size": 1},
        "launch": {"gpus": 8, "strategy": "fsdp"},
    }
    spec, cache = Experiment.model_validate(SPEC | changes), MemoryCache()
    fastest = Optimizations.model_validate(recipe("fastest", Path())["optimizations"])
    auto = Experiment.model_validate(SPEC).model_copy(update={"optimizations": fastest})  # a graph only on the H100
    for way, name in ((spec, "L40S"), (spec, "L4"), (spec, "L40S"), (auto, "H100 SXM5"), (auto, "B200")):
        assert cache.estimate(way, GPUS[name]).device == estimate_memory(way, GPUS[name]).device


@pytest.mark.usefixtures("few_ways")
def test_recommending_needs_few_calls():
    goal = Goal(Experiment.model_validate(SPEC), (GPUS["H200 SXM"],), 1e6, history=RunHistory.read(ROOT / "results"))
    assert calls_of(lambda: recommend(goal)) < 140_000, "it grows with the runs of the store"
    several = [gpu for gpu in GPUS.values() if gpu.bf16][:8]
    goal = Goal(Experiment.model_validate(SPEC), tuple(several), 1e6, effective_batch=4)
    assert calls_of(lambda: recommend(goal)) < 180_000, "no batch is sought beyond the effective one"


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few_ways")
def test_the_best_way_is_written_as_a_valid_spec(ftbench, spec_file, tmp_path):
    best = tmp_path / "best.yaml"
    code, out, err = ftbench(
        "recommend", spec_file, "--gpu", "H200 SXM", "--samples", 50000, "--deadline", "8h", "-o", best
    )
    assert (code, err) == (0, "")
    assert f"ftbench run {best}" in out
    spec = load(best)
    assert (spec.name, spec.train.learning_rate, spec.method.rank) == ("best", 1e-4, 16)  # type: ignore[union-attr]
    found = estimate_duration(spec, GPUS["H200 SXM"])
    assert spec.train.max_steps * found.samples == pytest.approx(50000, rel=0.02)  # type: ignore[operator]


def test_json_has_options_and_the_spec(ftbench, spec_file):
    asked = ("--gpu", "H200 SXM", "--gpu", "L40S", "--samples", 1000, "--method", "lora")
    code, out, _ = ftbench("recommend", spec_file, *asked, "--json")
    found = json.loads(out)
    assert code == 0
    assert {option["gpu"] for option in found["options"]} == {"H200 SXM", "L40S"}
    assert found["options"][0]["seconds"]["expected"] <= found["options"][1]["seconds"]["expected"]
    assert (
        Experiment.model_validate(found["spec"]).optimizations.model_dump(exclude_defaults=True)
        == (found["options"][0]["optimizations"])
    )
    assert any(option["changes_the_loss"] for option in found["options"] if "fp8" in option["optimizations"])


@pytest.mark.usefixtures("few_ways")
def test_no_option_is_exit_code_1(ftbench, spec_file):
    code, out, _ = ftbench("recommend", spec_file, "--gpu", "H200 SXM", "--samples", 10**12, "--deadline", "8h")
    assert code == 1
    assert "The closest is later than the deadline" in out


@pytest.mark.usefixtures("few_ways")
def test_answer_at_another_length_is_the_answer_to_a_question_about_it(tmp_path):
    def asked(length):
        sets = spec_sets(None, None, None, length, 20_000)
        return requests.answer(requests.RecommendRequest(Path("Qwen/Qwen3-8B"), sets, "5090", store=tmp_path))

    for factor, best in asked(300).lengths:
        direct = asked(round(factor * 300)).options[0]
        assert (variant_words(best.spec), best.spec.train) == (variant_words(direct.spec), direct.spec.train)


def test_the_command_has_no_value_that_the_recipe_sets(tmp_path):
    sets = spec_sets(None, None, None, 600, 20_000)
    request = requests.RecommendRequest(Path("Qwen/Qwen3-8B"), sets, "5090", store=tmp_path)
    command = requests.command_of(request, requests.answer(request))
    assert "--recipe fastest-fp8" in command
    assert not [key for key in ("precision", "optimizer", "cuda_graph") if key in command]
    assert "optimizations.triton_kernels=on" in command  # auto is off on a card without measurements


CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if not path.name.startswith("prices"))
SOME = [path for path in CONFIGS if "120b" not in path.name and "32b" not in path.name]  # these differ in the size
CARDS = [gpu.name for gpu in gpus()[:20]]


@pytest.mark.usefixtures("few_ways")
@pytest.mark.parametrize(
    ("configs", "cards"), [(SOME, CARDS[::9]), pytest.param(CONFIGS, CARDS, marks=pytest.mark.exhaustive)], ids=len
)
def test_all_shipped_configs_on_many_cards_have_one_answer(monkeypatch, tmp_path, configs, cards):
    """The first row, the sentence, the written spec and the command agree."""
    monkeypatch.setattr(requests, "with_lengths", lambda answer: answer)
    for path in configs:
        request = requests.RecommendRequest(path, gpu=",".join(cards), samples=1000, store=tmp_path)
        if load(path).objective.prompts:
            with pytest.raises(SpecError, match="no formula"):
                requests.answer(request)
            continue
        answer = requests.answer(request)
        text = as_text(answer, requests.command_of(request, answer))
        if not answer.options:
            assert "no training variant fits" in text, path
            continue
        best = answer.options[0]
        row = text.partition("\nGPU ")[2].splitlines()[1].split("  ")
        cells = [cell.strip() for cell in row if cell.strip()]
        location, way, batch, seconds = cells[:4]
        assert location == best.location, path
        step = f" ({best.duration.samples:.0f} samples per step)" if best.spec.optimizations.packing else ""
        assert f"Best: {way}, batch {batch}{step}, on {location}: {seconds} (" in " ".join(text.split()), path
        (tmp_path / "best.yaml").write_text(as_yaml(answer))
        written, typed = load(tmp_path / "best.yaml"), typed_spec(printed_command(text))
        assert written == as_runnable(best, answer.goal).model_copy(update={"name": "best"}), path
        rest = {"name": written.name, "dataset": written.dataset}  # the file names the number of samples
        assert typed.model_copy(update=rest) == written, path


def test_the_decision_guide_has_the_answers_of_recommend(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(requests, "with_lengths", lambda answer: answer)
    page = (ROOT / "docs" / "how-to" / "choose-a-card.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.count("|") == 7]
    rows = [row for row in rows if "/" in row[0]]
    assert len(rows) == 20
    for model in dict.fromkeys(row[0] for row in rows):
        named = {row[1]: row[2:4] for row in rows if row[0] == model}
        sets, night = [f"model.id={model}"], ROOT / "configs" / "night.yaml"
        request = requests.RecommendRequest(night, sets, gpu=",".join(named), deadline_s=8 * 3600)
        best = {option.gpu.name: option for option in requests.answer(request).best_per_gpu()}
        for gpu, (way, batch) in named.items():
            if gpu not in best:
                assert way == "nothing fits within 8 h", (model, gpu)
                continue
            train = best[gpu].spec.train
            told = [variant_words(best[gpu].spec), f"{train.batch_size} x {train.gradient_accumulation_steps}"]
            assert [way, batch] == told, f"{model} on {gpu}: run scripts/decision-table"


def test_all_ways_are_listed_on_request(ftbench, spec_file):
    arguments = ("recommend", spec_file, "--gpu", "H200 SXM", "--samples", 1000, "--method", "qlora")
    count = len(json.loads(ftbench(*arguments, "--json")[1])["options"])
    rows = [line for line in ftbench(*arguments, "--all", "--wide")[1].splitlines() if line.startswith("H200 SXM")]
    assert len(rows) == count > 10


def test_gpus_with_the_same_reason_share_one_sentence(ftbench, spec_file):
    small = ("--set", "model.id=Qwen/Qwen3-0.6B", "--set", "train.batch_size=1")
    code, out, err = ftbench("estimate", spec_file, *small, "--gpu", "T4,V100 SXM2 32GB,H200 SXM")
    assert code == 0, err
    said = " ".join(out.split())
    assert said.count("is not known: set train.precision to fp16") == 1
    assert "--store; also V100 SXM2 32GB" in said


def test_no_probe_is_suggested_for_gpus_that_do_not_fit(ftbench, spec_file):
    full = ("estimate", spec_file, "--set", "method=full", "--set", "dataset=japanese-alpaca")
    said = " ".join(ftbench(*full, "--gpu", "T4,V100 SXM2 32GB")[1].split())
    assert "is not known, and the spec does not fit; also V100 SXM2 32GB" in said
    assert "ftbench probe" not in said
    assert "assume more memory" not in said


def test_a_batch_of_unknown_data_is_not_all_samples(ftbench, spec_file):
    full = ("estimate", spec_file, "--set", "method=full", "--set", "dataset=japanese-alpaca", "--gpu")
    assert re.search(r"It does not fit any of these 2 GPUs[\s\S]*T4 +does not fit .* none ", ftbench(*full, "T4,L4")[1])
    assert "none, even batch 1 may not fit" in ftbench(*full, "T4")[1]


@pytest.mark.usefixtures("few_ways")
def test_a_gpu_without_a_rate_in_the_precision_is_ruled_out_among_others(ftbench, spec_file):
    """Qwen3-0.6B fits, but the speed of the card in this precision is not known."""
    small = ("--set", "model.id=Qwen/Qwen3-0.6B", "--samples", 1000)
    asked = ("recommend", spec_file, *small, "--gpu", "T4,H200 SXM")
    code, out, err = ftbench(*asked, "--json")
    found = json.loads(out)
    assert code == 0, err
    assert {option["gpu"] for option in found["options"]} == {"H200 SXM"}
    assert any(reason.startswith("not on T4: the speed of T4 in bf16") for reason in found["ruled_out"])
    text = " ".join(ftbench(*asked)[1].split())
    assert "no variant is possible or within the limits on T4: see --all" in text


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--gpu", "T4,V100 SXM2 32GB", "--samples", "9"], "the speed of V100 SXM2 32GB in bf16 is not known"),
    (["--gpu", "H300", "--samples", "9"], "--gpu H300: not in the table"),
    (["--gpu", "RTX 4091", "--samples", "9"], "--gpu RTX 4091: not in the table; did you mean RTX 4090?"),
    (["--gpu", "h100", "--samples", "9"], "several GPUs: H100 NVL (94 GB), H100 PCIe (80 GB), H100 SXM5 (80 GB)"),
    (["--gpu", ",", "--samples", "9"], "--gpu: name GPUs"),
    (["--gpu", "H200 SXM"], "--samples: required, because"),
    (["--gpu", "H200 SXM", "--samples", "0"], "Invalid value for '--samples'"),
    (["--gpu", "H200 SXM", "--samples", "9", "--deadline", "soon"], "'--deadline': soon: write it as 8h"),
    (["--gpu", "H200 SXM", "--samples", "9", "--goal", "best"], "'best' is not one of 'speed', 'cost'"),
    (["--gpu", "H200 SXM", "--samples", "9", "--goal", "cost"], "--goal cost: needs --prices"),
    (["--gpu", "H200 SXM", "--samples", "9", "--max-cost", "5"], "--max-cost 5: needs --prices"),
    (["--gpu", "H200 SXM", "--samples", "9", "--max-cost", "0", "--prices", "PRICES"], "greater than or equal to 0"),
    (["--gpu", "H200 SXM,L40S", "--samples", "9", "--max-cost", "5", "--prices", "PRICES"], "has no price for L40S"),
    (["--gpu", "H200 SXM,H100 PCIe", "--samples", "9", "--max-cost", "5", "--prices", "PRICES"], "in JPY and USD"),
    (["--gpu", "H200 SXM", "--samples", "9", "--method", "lora,loar"], "'loar' is not a method"),
    (["--gpu", "H200 SXM", "--samples", "9", "--effective-batch", "0"], "--effective-batch 0: samples per step"),
    (["--gpu", "H200 SXM", "--samples", "9", "--set", "model=some/model"], "the shape of some/model is unknown"),
    (["--gpu", "H200 SXM", "--samples", "9", "--set", "train.precision=fp32"], "in fp32 is not known: run"),
    (["--gpu", "H200 SXM", "--samples", "9", "--store", "SPEC"], "is a file"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else None)  # fmt: skip
def test_invalid_options_are_errors(ftbench, spec_file, arguments, sentence):
    files = {"SPEC": spec_file, "PRICES": ROOT / "configs" / "prices-example.yaml"}
    code, out, err = ftbench("recommend", spec_file, *(files.get(word, word) for word in arguments))
    assert (code, out) == (2, "")
    assert sentence in err
    assert "Traceback" not in err


def test_estimate_reports_time_energy_and_cost(ftbench, spec_file):
    prices = ROOT / "configs" / "prices-example.yaml"
    asked = ("estimate", spec_file, "--gpu", "H200 SXM", "--samples", 1000, "--hours", 10, "--prices", prices, "--json")
    code, out, _ = ftbench(*asked, "--store", ROOT / "results")
    time_told = json.loads(out)["gpus"][0]["time"]
    assert code == 0
    assert time_told["basis"] == "formula"
    assert time_told["samples_in_hours"]["expected"] == pytest.approx(10 * time_told["samples_per_hour"], rel=0.01)
    assert time_told["cost"]["value"] == pytest.approx(4.0 / 3600 * time_told["training_s"]["expected"])
    code, out, _ = ftbench(*asked[:-1])
    assert "10 h" in out
    assert "kWh" in out


@pytest.mark.usefixtures("few_ways")
def test_a_missing_price_is_named(ftbench, spec_file):
    asked = ("estimate", spec_file, "--prices", ROOT / "configs" / "prices-example.yaml")
    _, alone, _ = ftbench(*asked, "--gpu", "H200 SXM")
    assert re.search(r"\ncost +not known: use --samples N\n", alone)  # how many rows the data set has is not known
    _, out, _ = ftbench(*asked, "--gpu", "H200 SXM,L40S", "--samples", 1000)
    assert re.search(r"\nL40S .* no price ", out)
    _, ranked, _ = ftbench("recommend", *asked[1:], "--gpu", "H200 SXM,L40S", "--samples", 1000)
    assert re.search(r"\nL40S .* no price ", ranked)


@pytest.mark.usefixtures("few_ways")
def test_very_many_samples_are_estimated(ftbench, spec_file):
    data = f"dataset={{name: synthetic, mean_length: 200, samples: {2**63 - 1}, max_length: 2048}}"
    for command in ("estimate", "recommend"):
        code, _, err = ftbench(command, spec_file, "--gpu", "H200 SXM", "--set", data)
        assert (code in (0, 1), "Traceback" in err) == (True, False), err


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--samples", "0"], "Invalid value for '--samples'"),
    (["--hours", "-1"], "greater than or equal to 0.001"),
    (["--hours", "nan"], "less than or equal to 1000000"),
    (["--prices", "/nowhere"], "/nowhere: no such file"),
], ids=" ".join)  # fmt: skip
def test_estimate_rejects_invalid_amounts(ftbench, spec_file, arguments, sentence):
    code, _, err = ftbench("estimate", spec_file, "--gpu", "H200 SXM", *arguments)
    assert code == 2
    assert sentence in err


def test_memory_is_estimated_for_the_requested_samples_and_not_for_the_specs_steps(tmp_path):
    """A spec that trains 20 steps draws few samples. With `--samples`, the recommended run also meets the longest."""
    path, out = tmp_path / "short.yaml", tmp_path / "best.yaml"
    path.write_text(json.dumps({
        "model": {"id": "Qwen/Qwen3-8B", "weights": "random"}, "method": "lora",
        "dataset": {"name": "synthetic", "samples": 20000, "mean_length": 600, "max_length": 4096},
        "train": {"batch_size": 16, "max_steps": 20},
    }))  # fmt: skip
    found = requests.answer(requests.RecommendRequest(path, gpu="A100 80GB", samples=20_000, method="unsloth"))
    out.write_text(as_yaml(found))
    memory = estimate_memory(load(out), GPUS["A100 80GB"])
    assert memory.verdict == "fits"
    assert memory.device == found.options[0].memory.device


def test_the_printed_command_keeps_the_order_of_a_recipe_and_other_settings(spec_file):
    sets = ["method=full", "recipe=small"]  # the recipe sets the method to qlora
    found = load(spec_file, sets)
    typed = typed_spec(shlex.split(run_command(spec_file, sets, found, GPUS["RTX 4090"]))[2:])
    assert (typed.method, typed.train, typed.optimizations) == (found.method, found.train, found.optimizations)


@pytest.mark.parametrize(
    ("gpu", "method", "refused"),
    [("H100 SXM5", "full", "set model.dtype to float32"), ("T4", "lora", "attention varlen")],
)
def test_options_with_fp16_can_run_after_auto_is_resolved(gpu, method, refused):
    model = {"id": "Qwen/Qwen3-0.6B", "weights": "random"}
    found = ask(gpu, spec={"model": model, "method": {"name": method}, "train": {"precision": "fp16"}})
    assert any(refused in reason for reason in found.ruled_out)
    for option in found.options:
        on = resolve(option.spec, capability_of(option.gpu))
        assert [*incompatibilities(on), *machine_incompatibilities(on, capability_of(option.gpu))] == []
