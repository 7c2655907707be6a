"""Estimates of objective grpo: generation, scoring and the passes of a step.

They are compared with recorded steps of trl's own trainer and with published figures of models and GPUs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ftbench.core.hardware import find_gpu
from ftbench.core.units import GIB
from ftbench.errors import SpecError
from ftbench.estimate.memory.constants import constants
from ftbench.estimate.memory.estimate import UNSEEN_SPREAD, estimate_memory
from ftbench.estimate.memory.largest_batch import MemoryCache, largest_batch
from ftbench.estimate.recommend.nearest import nearest_fit
from ftbench.estimate.recommend.ranking import Goal, recommend
from ftbench.estimate.time.duration import SCALED, SHEET, epochs_samples, estimate_duration
from ftbench.estimate.time.history import RunHistory
from ftbench.estimate.time.timed_runs import timed_runs
from ftbench.estimate.workload.lengths import file_lengths
from ftbench.spec.experiment import Experiment, resolve
from made_runs import make_run, steps

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import estimate_study as study

H200 = find_gpu("NVIDIA H200")
assert H200 is not None
RESULTS = Path(__file__).resolve().parents[2] / "results" / "h200"
TINY = Path(__file__).resolve().parents[2] / "configs" / "grpo-tiny.yaml"
VALUES: dict[str, Any] = {
    "name": "policy",
    "model": {"id": "tiny/qwen3", "weights": "random"},
    "method": {"name": "lora"},
    "objective": {"name": "grpo", "num_generations": 4, "max_completion_length": 64, "fixed_length": True},
    "dataset": {"name": "synthetic", "samples": 64, "length": 64, "max_length": 1024},
    "train": {"batch_size": 8},
}


def spec(**changes: dict[str, Any]) -> Experiment:
    return Experiment.model_validate(VALUES | {key: VALUES.get(key, {}) | more for key, more in changes.items()})


def of_8b(**changes: dict[str, Any]) -> Experiment:
    return spec(**{"model": {"id": "Qwen/Qwen3-8B"}} | changes)


MANY = {"batch_size": 8, "gradient_accumulation_steps": 4}  # 32 completions of a step
LONG = {"objective": {"max_completion_length": 800}, "train": MANY}
ASKED = {"objective": {"max_completion_length": 8}, "dataset": {"length": 512}, "train": MANY}
PADDED = {"length": None, "mean_length": 64, "max_length": 256}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "lora": {"objective": {"beta": 0.1}, "train": {"batch_size": 32}},
    "lora, long completions": LONG,
    "lora, long prompts": ASKED,
    "full, long completions": {"method": {"name": "full"}, **LONG},
    "full, long prompts": {"method": {"name": "full"}, **ASKED},
    "full in float32, long completions": {"method": {"name": "full"}, "model": {"dtype": "float32"}, **LONG},
    "eager, long prompts": {"optimizations": {"attention": "eager"}, **ASKED},
    "padded prompts, long completions": {**LONG, "dataset": PADDED},
    "checkpoints": {"optimizations": {"gradient_checkpointing": True}, "train": {"batch_size": 32}},
    "experts, long completions": {"model": {"id": "tiny/qwen3-moe"}, **LONG},
    "qlora, long completions": {"method": {"name": "qlora"}, **LONG},
    "qlora, long prompts": {"method": {"name": "qlora"}, **ASKED},
}
PEAKS = {"lora": ("loss", "backward"), "qlora, long prompts": ("generation, prompts", "generation")}
# GiB that trl's own trainer allocated on tensors without memory (see test_recorded_peaks.py).
RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("recorded_peaks.json").read_text())["grpo"]
WORKSPACE = 64 / 1024  # GiB of cuBLAS, much more than a tiny model


@pytest.mark.parametrize("name", CASES)
def test_each_phase_of_a_step_agrees_with_trl(name):
    phases = estimate_memory(spec(**CASES[name]), H200).phases
    known = {phase: size / constants().allocated_factor - WORKSPACE for phase, size in phases.items()}
    recorded = {phase: size - WORKSPACE for phase, size in RECORDED[name]["phases"].items()}
    generation = max(size for phase, size in known.items() if phase.startswith("generation"))
    training = max(size for phase, size in known.items() if not phase.startswith(("generation", "scoring")))
    assert generation == pytest.approx(recorded["generation"], rel=0.015)
    assert training == pytest.approx(max(recorded[each] for each in ("forward", "backward", "optimizer")), rel=0.035)
    if name == "lora":
        assert known["scoring"] == pytest.approx(recorded["scoring"], rel=0.03)


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_step_agrees_with_trl(name):
    estimate, recorded = estimate_memory(spec(**CASES[name]), H200), RECORDED[name]
    assert estimate.allocated.expected / constants().allocated_factor == pytest.approx(recorded["peak"], rel=0.02)
    assert estimate.allocated.high / estimate.allocated.expected == pytest.approx(1 + UNSEEN_SPREAD)
    if name in PEAKS:
        assert (estimate.peak_phase, recorded["phase"]) == PEAKS[name]


def test_prompts_are_read_with_sinks_and_a_mask_for_each_window():
    values = spec(model={"id": "tiny/gpt-oss"}, **ASKED)
    known = estimate_memory(values, H200).phases["generation, prompts"] / constants().allocated_factor - WORKSPACE
    assert known == pytest.approx(RECORDED["sinks, long prompts"]["phases"]["generation"] - WORKSPACE, rel=0.015)


def test_keys_and_values_have_the_published_size():
    """Qwen3-8B keeps 8 heads of 128 in 36 layers: 147,456 bytes per token in 16 bits."""
    asked = of_8b(objective={"max_completion_length": 4097}, train={"batch_size": 1, "gradient_accumulation_steps": 64})
    cache = estimate_memory(asked, H200)
    assert cache.peak_phase == "generation"
    parts = cache.parts["keys and values"] * GIB / constants().allocated_factor
    assert parts == 64 * (64 + 4096) * 147_456


def test_completions_of_open_length_count_with_their_maximum(ftbench):
    sets = ["--set", "objective.fixed_length=off", "--set", "model=Qwen/Qwen3-8B", "--set", "dataset.length=100"]
    code, out, err = ftbench("estimate", TINY, "--gpu", "H200 SXM", *sets)
    told = " ".join(out.split())
    assert (code, err) == (0, "")
    assert "8 x 116 positions (every sample has 100 tokens; completions of at most 16 tokens)" in told
    assert "prompts exact: synthetic lengths; completions of at most 16 tokens" in told
    assert "so these times are upper bounds" in told
    assert "of the step, before its first forward pass" in told
    assert "no run of objective grpo on this GPU" in told
    document = json.loads(ftbench("estimate", TINY, "--gpu", "H200 SXM", "--json", *sets)[1])
    (row,) = document["gpus"]
    assert 0 < row["time"]["generation_s"] < row["time"]["step_s"]["expected"]
    assert {"generation", "generation, prompts"} <= {*row["phases"]}


def test_a_token_takes_at_least_the_time_to_read_the_weights():
    """8.19e9 parameters in 16 bits (the model's card) at 4.8 TB/s (the GPU's data sheet), and one after the other."""
    short, long = (of_8b(objective={"max_completion_length": tokens}) for tokens in (101, 201))
    first, second = (estimate_duration(each, H200) for each in (short, long))
    least = (8.19e9 - 4096 * 151_936) * 2 / 4.8e12
    assert first.generation_s > 100 * least
    assert second.generation_s - first.generation_s > 100 * least
    assert second.parts["generation"] - first.parts["generation"] > 100 * least
    assert first.generation_s < first.step_s.expected
    assert (first.basis, first.bound) == (SHEET, "host")  # Python starts each token's kernels


def test_a_step_generates_all_completions_at_once():
    together = of_8b(train={"batch_size": 4, "gradient_accumulation_steps": 16})
    alone = of_8b(train={"batch_size": 4})
    few, many = (estimate_memory(each, H200) for each in (alone, together))
    assert many.phases["generation"] > few.phases["generation"]
    cache = MemoryCache()
    assert [cache.estimate(each, H200).phases for each in (alone, together)] == [few.phases, many.phases]


def test_the_reference_adds_a_forward_pass():
    plain, held = (of_8b(objective={"beta": beta}) for beta in (0.0, 0.1))
    assert "scoring" not in estimate_memory(plain, H200).phases
    assert "scoring" in estimate_memory(held, H200).phases
    assert "reference model" not in estimate_memory(held, H200).parts  # the weights under the adapters
    times = [estimate_duration(each, H200) for each in (plain, held)]
    assert times[0].generation_s == times[1].generation_s
    assert times[0].step_s.expected < times[1].step_s.expected


@pytest.mark.parametrize("passes", [1, 3, 4])
def test_the_largest_batch_has_full_groups(passes):
    train = {"batch_size": 4, "gradient_accumulation_steps": passes}
    asked = of_8b(train=train, dataset={"samples": 4096}, objective={"max_completion_length": 512})
    largest = largest_batch(asked, H200)
    assert largest
    taken = {"train": train | {"batch_size": largest}, "dataset": {"samples": 4096},
             "objective": {"max_completion_length": 512}}  # fmt: skip
    assert estimate_memory(of_8b(**taken), H200).verdict == "fits"
    unit = {1: 4, 3: 4, 4: 1}[passes]
    more = taken | {"train": train | {"batch_size": largest + unit}}
    assert estimate_memory(of_8b(**more), H200).verdict != "fits"


def test_few_prompts_limit_the_batch():
    assert largest_batch(spec(dataset={"samples": 3}), H200) == 3 * 4
    passes = {"batch_size": 4, "gradient_accumulation_steps": 3}
    assert largest_batch(spec(dataset={"samples": 3}, train=passes), H200) == 4


def test_recommended_specs_are_valid_and_fit():
    asked = of_8b(objective={"max_completion_length": 1024}, dataset={"length": 1024})
    found = recommend(Goal(asked, (H200,), 256, effective_batch=8))
    assert {option.spec.method.name for option in found.options} == {"lora", "qlora"}
    assert True in {option.spec.optimizations.gradient_checkpointing for option in found.options}
    for option in found.options:
        taken = Experiment.model_validate(option.spec.model_dump())
        assert taken.global_batch == 8
        assert estimate_memory(taken, H200).verdict == "fits"
    small = find_gpu("RTX 4090")
    assert estimate_memory(asked, small).verdict == "does not fit"
    fit = nearest_fit(asked, small)
    assert fit.memory.verdict == "fits"
    assert Experiment.model_validate(fit.spec.model_dump()).global_batch == 8


def test_samples_are_completions():
    assert epochs_samples(spec(train={"epochs": 2}), 8) == 2 * 64 * 4
    assert estimate_duration(spec(), H200).samples == 8


def test_runs_of_other_objectives_do_not_correct_generation():
    store = RunHistory(None, timed_runs([RESULTS / "qwen3-8b-optimizations"]))
    assert store.on(H200)
    with_runs, without = (estimate_duration(of_8b(), H200, each) for each in (store, RunHistory()))
    assert (with_runs.step_s, with_runs.basis) == (without.step_s, SHEET)


def test_a_run_is_compared_at_its_real_completions(store_of):
    store = store_of(resolve(of_8b(), (9, 0)), 1.0)
    (run,) = study.read([store.path])
    estimate = run.estimate()
    assert estimate.batch == (8, 128)
    expected = estimate_memory(of_8b(), H200, total=run.total)
    assert estimate.phases == expected.phases


def test_runs_with_generation_correct_the_estimate(store_of):
    """A run that took twice the modelled time makes the next estimate longer."""
    values = resolve(of_8b(), (9, 0))
    seconds = 2 * estimate_duration(values, H200).step_s.expected
    store = store_of(values, seconds)
    (run,) = store.runs
    assert run.batch.made == 64
    again = estimate_duration(values, H200, store)
    assert again.step_s.expected == pytest.approx(seconds, rel=0.01)
    assert 0 < again.generation_s < seconds
    other = of_8b(objective={"max_completion_length": 96})
    near, bare = (estimate_duration(other, H200, each) for each in (store, RunHistory()))
    assert near.basis == SCALED
    assert 1.4 * bare.step_s.expected < near.step_s.expected < 2.1 * bare.step_s.expected
    learns = Experiment.model_validate(VALUES | {"objective": {"name": "sft"}, "model": {"id": "Qwen/Qwen3-8B"}})
    with_run, without = (estimate_duration(learns, H200, each) for each in (store, RunHistory()))
    assert with_run.step_s == without.step_s


@pytest.fixture
def store_of(tmp_path):
    def store(values: Experiment, seconds: float) -> RunHistory:
        """A store with one run of steps of 8 completions of 64 tokens to prompts of 64."""
        rows = steps(seconds=seconds, samples=8, real_tokens=1024, padded_tokens=1024, label_tokens=512)
        document = values.model_dump(mode="json")
        sections = ("model", "method", "objective", "dataset", "train", "optimizations", "launch")
        make_run(tmp_path, "policy", rows, spec={name: document[name] for name in sections})
        return RunHistory(tmp_path, timed_runs([tmp_path]))

    return store


LONG = "word " * 400


@pytest.mark.parametrize("row", [
    {"prompt": "one two", "completion": LONG},
    {"question": "one two", "answer": LONG},
    {"messages": [{"role": "user", "content": "one two"}, {"role": "assistant", "content": LONG}]},
])  # fmt: skip
def test_prompts_are_counted_without_answers(tmp_path, row):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    asked = spec(dataset={"name": "file", "path": str(path), "length": None, "samples": None})
    counted = (file_lengths(asked.dataset, asked.model, prompts=prompts).values for prompts in (True, False))
    (length,), (whole,) = counted
    assert length < 20 < 400 < whole


@pytest.mark.parametrize("command", [["estimate"], ["recommend"]])
def test_a_model_with_images_is_an_error(ftbench, command):
    code, _, err = ftbench(*command, TINY, "--gpu", "H200 SXM", "--set", "model=Qwen/Qwen2.5-VL-7B-Instruct")
    assert (code, "supports text only" in " ".join(err.split())) == (2, True), err
    with pytest.raises(SpecError, match="choose another model"):
        estimate_duration(spec(model={"id": "Qwen/Qwen2.5-VL-7B-Instruct"}), H200)


def test_a_step_without_full_groups_is_an_error(ftbench):
    code, _, err = ftbench("recommend", TINY, "--gpu", "H200 SXM", "--effective-batch", 10)
    assert (code, "must be a multiple" in err) == (2, True), err
