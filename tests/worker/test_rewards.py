"""A user's reward functions are executed, learned, recorded and validated."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

import warm
from conftest import spec_of
from ftbench.errors import SpecError
from ftbench.spec.identity import fingerprint
from ftbench.spec.load import load
from ftbench.store.rundir import read_json
from ftbench.store.steps import read_steps
from ftbench.worker.grpo import load_reward

GRPO = {"name": "grpo", "num_generations": 16, "max_completion_length": 8, "fixed_length": True}
LEARNS = {
    "method": {"name": "full"}, "dataset": {"samples": 20, "mean_length": None, "length": 8},
    "train": {"batch_size": 32, "learning_rate": 0.2, "lr_scheduler": "constant", "max_grad_norm": 0},
}  # fmt: skip
ODD = "def odd(completion_ids, **columns):\n    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]\n"


@pytest.fixture
def reward_of(tmp_path):
    """Write a file with reward functions and return the reference to one of them."""

    def write(text, function="judge", file="judge.py"):
        (tmp_path / file).write_text(text)
        return f"{tmp_path / file}:{function}"

    return write


def rewards_of(run):
    return [row.reward for row in read_steps(run.steps)[0] if row.phase == "train"]


def test_own_reward_is_learned_and_a_constant_one_is_not(train_here, reward_of):
    odd = reward_of(ODD, "odd")
    run = train_here(**LEARNS, objective=GRPO | {"reward": odd})
    made = rewards_of(run)
    assert made[0] < 0.7
    assert made[-1] > 0.8  # the built-in reward would have fallen
    assert read_json(run.applied)["generation"] == {
        "by": "transformers generate", "reward": "judge.py:odd",
        "reward_sha256": hashlib.sha256(ODD.encode()).hexdigest(),
    }  # fmt: skip
    constant = reward_of("def judge(completions, **columns):\n    return [0.25] * len(completions)\n", file="same.py")
    short = LEARNS | {"train": LEARNS["train"] | {"max_steps": 2}}
    rows = read_steps(train_here(**short, objective=GRPO | {"reward": constant}).steps)[0]
    assert {(row.loss, row.grad_norm, row.reward) for row in rows if row.phase == "train"} == {(0, 0, 0.25)}


def test_several_rewards_add_up(train_here, reward_of):
    text = ODD + "def judge(completion_ids, **columns):\n    return [1 - each for each in odd(completion_ids)]\n"
    both = [reward_of(text, "odd"), reward_of(text)]
    short = LEARNS | {"train": LEARNS["train"] | {"max_steps": 2}}
    run = train_here(**short, objective=GRPO | {"reward": both})
    assert rewards_of(run) == pytest.approx([1.0] * 2)
    assert read_json(run.applied)["generation"]["reward"] == "judge.py:odd + judge.py:judge"


def test_reward_gets_texts_and_columns(train_here, reward_of, tmp_path):
    """Missing values are None. Columns with the names of trl's arguments are dropped."""
    rows = [{"prompt": f"Say {n}.", "solution": n, "completions": "x"} | ({"hint": "h"} if n else {}) for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = reward_of(
        "import json\nfrom pathlib import Path\n"
        "def judge(prompts, completions, solution, hint, **columns):\n"
        "    seen = [list(each) for each in zip(prompts, completions, solution, hint)]\n"
        "    with open(Path(__file__).with_name('seen.jsonl'), 'a') as file:\n"
        "        file.write(json.dumps([seen, sorted(columns)]) + '\\n')\n"
        "    return [0] * len(completions)\n"
    )
    data = {"name": "file", "path": str(tmp_path / "rows.jsonl"), "format": "prompt", "max_length": 64}
    data |= {"samples": None, "mean_length": None}
    small = GRPO | {"num_generations": 2, "max_completion_length": 3, "reward": judge}
    train_here(objective=small, dataset=data, train={"batch_size": 4})
    calls = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    seen = [each for call, _ in calls for each in call]
    assert sorted(solution for _, _, solution, _ in seen) == [0, 0, 1, 1, 2, 2, 3, 3]
    for prompt, completion, solution, hint in seen:
        assert f"Say {solution}." in prompt
        assert isinstance(completion, str)
        assert hint == ("h" if solution else None)
    assert calls[0][1] == ["completion_ids", "log_extra", "log_metric", "trainer_state"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "returned [1.0] for 4 completions: it must return one finite number for each"),
        ("return [float('nan')] * 4", "returned [nan, nan, nan, nan] for 4 completions"),
        ("return [0.0, float('inf'), 0.0, 0.0]", "returned [0.0, inf, 0.0, 0.0] for 4 completions"),
        ("return ['good'] * 4", "ValueError: could not convert string to float: 'good'"),
        ("return (x / 0 for x in [1])", "judge.py:judge: ZeroDivisionError: division"),
        ("import sys\n    sys.exit(3)", "SystemExit: 3"),
    ],
)
def test_invalid_rewards_are_an_error(reward_of, body, message):
    judge = load_reward(reward_of(f"def judge(completions, **columns):\n    {body}\n"))
    with pytest.raises(SpecError, match=r"objective\.reward: judge\.py:judge") as error:
        judge(completions=["a", "b", "c", "d"], prompts=["p"] * 4)
    assert message in str(error.value)


def test_numpy_torch_and_bool_values_are_accepted(reward_of):
    head = "import numpy, torch\ndef judge(completions, **columns):\n    return "
    for body in ("numpy.ones(2)", "torch.ones(2)", "[True, torch.tensor(1)]", "(1 for _ in completions)"):
        assert load_reward(reward_of(head + body))(completions=["a", "b"]) == [1.0, 1.0]


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_out_of_memory_in_a_reward_is_raised_unchanged(reward_of, error):
    text = "CUDA out of memory. Tried to allocate 2.00 GiB"
    judge = load_reward(reward_of(f"def judge(**columns):\n    raise {error.__name__}({text!r})"))
    with pytest.raises(error):
        judge(completions=["a"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module\n", "ModuleNotFoundError"),
        ("judge = 3", "does not define judge"),
    ],
)
def test_file_without_a_usable_function_is_an_error(reward_of, text, message):
    with pytest.raises(SpecError, match=message):
        load_reward(reward_of(text))


def test_fingerprint_depends_on_the_reward_files_content(reward_of, tmp_path):
    (tmp_path / "else").mkdir()

    def made(named):
        return fingerprint(spec_of(objective=GRPO | {"reward": named}, train={"batch_size": 16}))

    first, moved = made(reward_of(ODD, "odd")), made(reward_of(ODD, "odd", "else/judge.py"))
    edited, other = made(reward_of(ODD + "#", "odd")), made(reward_of(ODD + "#", "judge"))
    ours = fingerprint(spec_of(objective=GRPO, train={"batch_size": 16}))
    assert first == moved
    assert len({first, edited, other, ours}) == 4


def spec_with(folder, reward):
    folder.mkdir(exist_ok=True)
    path = folder / "spec.yaml"
    path.write_text(
        "model: {id: tiny/qwen3, weights: random}\nmethod: lora\ntrain: {batch_size: 4}\n"
        "dataset: {name: synthetic, samples: 4, length: 8}\n"
        f"objective: {{name: grpo, num_generations: 4, max_completion_length: 4, reward: {reward}}}\n"
    )
    return path


def test_path_is_relative_to_the_spec(tmp_path):
    spec = load(spec_with(tmp_path / "specs", "../judge.py:judge"))
    assert spec.objective.reward == (f"{tmp_path}/judge.py:judge",)
    spec = load(spec_with(tmp_path / "specs", "[a.py:judge, b.py:judge]"))
    assert spec.objective.reward == tuple(f"{tmp_path}/specs/{name}.py:judge" for name in "ab")


@pytest.mark.parametrize(
    ("text", "reward", "message"),
    [
        ("", "nowhere.py:judge", "nowhere.py: no such file"),
        ("", "judge.py", "'judge.py' must be path/to/file.py:function"),
        ("def judge(**columns): pass", "judge.py:jugde", "does not define jugde; did you mean judge?"),
        ("def judge(**columns):\n    return 1 / 0", "judge.py:judge", "judge.py:judge: ZeroDivisionError"),
    ],
)
def test_command_fails_with_a_message_and_code_2(tmp_path, cache, text, reward, message):
    (tmp_path / "judge.py").write_text(text)
    ended = warm.run(["run", spec_with(tmp_path, reward), "--out", tmp_path / "out"], {**os.environ})
    printed = ended.stdout + ended.stderr
    assert (ended.returncode, message in " ".join(printed.split())) == (2, True), printed
    assert "Traceback" not in printed
