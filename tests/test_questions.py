"""Questions of a new user, each answered by the output of at most three commands."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import shlex
import sys

import pytest

from ftbench.spec.load import load
from made_runs import RESULTS, gpu, make_run, steps


def words(text):
    return " ".join(text.split())


def test_what_does_a_night_with_an_rtx_4090_make_of_20000_rows_of_my_own(ftbench, tmp_path, monkeypatch):
    """Find a method and batch that fit, the duration, and the time left of the night."""
    dice = random.Random(7)
    lines = (json.dumps({"instruction": "word " * dice.randint(5, 80), "output": "answer " * dice.randint(5, 60)})
             for _ in range(20_000))  # fmt: skip
    (tmp_path / "own.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "mine.yaml").write_text("model: Qwen/Qwen3-8B\nmethod: qlora\ndataset: {name: file, path: own.jsonl}\n")
    monkeypatch.chdir(tmp_path)

    code, out, _ = ftbench("recommend", "mine.yaml", "--gpu", "RTX 4090", "--deadline", "8h", "-o", "best.yaml")
    assert code == 0
    assert "20,000 samples" in words(out)
    assert "deadline 8 h 00 min" in words(out)
    first = next(line for line in out.splitlines() if line.startswith("RTX 4090"))
    assert re.search(r"\d+ min \d\d s .* keeps", first)
    trains = r"in 8 h 00 min the best variant trains [\d,]+ samples \([\d,]+ to [\d,]+\), [\d,]+ passes"
    assert re.search(trains, words(out))
    best = load(tmp_path / "best.yaml")
    assert (best.dataset.samples or 20_000, best.dataset.path) == (20_000, str(tmp_path / "own.jsonl"))
    assert best.name == "best", "`ftbench run best.yaml` writes to results/best"
    assert "\n  ftbench run best.yaml\n" in out

    code, out, _ = ftbench("estimate", "best.yaml", "--gpu", "RTX 4090", "--check")
    assert code == 0
    assert "for a process" in out
    assert "RTX 4090 has 24.0 GiB" in words(out)
    assert re.search(r"training +20,000 samples in .* kWh", out)


# The words of a user, the command, and a pattern of the answer. `data.jsonl` has 200 rows; no command needs YAML.
QUESTIONS = {
    "Does it fit my card, and with which batch?": (
        "estimate Qwen/Qwen3-8B --gpu 4090", r"on RTX 4090: does not fit\n.*\nbatch +largest that fits: none"),
    "How likely does it fit?": (
        "estimate Qwen/Qwen3-8B --gpu L40S --length 117",
        r"on L40S: (fits|does not fit|(likely fits|may fit) \(about \d0 %\))\nmemory +[\d.]+ GiB \(90 %: [\d.]+ to "),
    "On which cards does it fit?": (
        "estimate Qwen/Qwen3-8B --recipe fastest-qlora --gpu all --length 600",
        r"It fits \d+ of \d\d GPUs\. The smallest is .*, the fastest .* \([\d.]+ m?s per step\)\."),
    "How long does it take with my file?": (
        "estimate Qwen/Qwen3-8B --gpu 'H100 SXM' --dataset data.jsonl --recipe fastest",
        r"\ntraining +200 samples in [\d.]+ s \(90 %: .* to .*\)"),
    "Which method and batch for 20,000 samples of 600 tokens?": (
        "recommend Qwen/Qwen3-8B --gpu 4090 --samples 20000 --length 600",
        r"\nRTX 4090 +(\w+: .*?)  +(\d[\d x]*)  .*(\n.*){0,3}\n\nBest: \1, batch \2 \(17 samples per step\), on RTX"),
    "Which of two cards is the cheapest, and what does each cost?": (
        "recommend Qwen/Qwen3-8B --gpu 5090,4090 --samples 20000 --length 600 --prices PRICES --goal cost",
        r"best by cost[\s\S]*\nRTX \d090 .* [\d.]+ USD .*\nRTX \d090 .* [\d.]+ USD [\s\S]*\sUSD\s\(rent\)"),
    "What takes the least memory?": (
        "recommend Qwen/Qwen3-8B --gpu 4090 --length 600 --goal memory", r"Best: .*, [\d.]+ of 24\.0 GiB"),
    "How long are my samples?": (
        "data Qwen/Qwen3-8B --dataset data.jsonl", r"tokens per sample: mean \d+, half up to \d+"),
    "Write me a file to start with.": (
        "init Qwen/Qwen3-8B --dataset data.jsonl --gpu 4090 --samples 2000 -o run.yaml",
        r"\n  ftbench run run\.yaml\n"),
    "Which card is meant?": (
        "estimate Qwen/Qwen3-8B --gpu 'RTX PRO 6000'", r"matches several GPUs: .*name one, such as"),
}  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_answer_is_in_the_first_ten_lines_without_yaml(ftbench, tmp_path, monkeypatch, question):
    command, answer = QUESTIONS[question]
    dice = random.Random(7)
    rows = ({"instruction": "word " * dice.randint(5, 80), "output": "answer " * 40} for _ in range(200))
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prices = RESULTS.parents[1] / "configs" / "prices.yaml"
    monkeypatch.chdir(tmp_path)
    code, out, err = ftbench(*(prices if word == "PRICES" else word for word in shlex.split(command)))
    assert code == (2 if "matches several" in err else 0)
    assert re.search(answer, "\n".join((out or err).splitlines()[:10]) + "\n"), out or err
    if command.startswith("init"):
        lines = (tmp_path / "run.yaml").read_text().splitlines()
        assert len(lines) <= 20
        assert sum("# " in line for line in lines) >= 5
        assert load(tmp_path / "run.yaml").dataset.path == str(tmp_path / "data.jsonl")


@pytest.mark.parametrize(("command", "fact", "fix"), [
    ("estimate Qwen/Qwen3-9B --gpu 4090", "the shape of Qwen/Qwen3-9B is not known", "did you mean Qwen/Qwen3-8B?"),
    ("recommend Qwen3-8B --gpu 4090", "no such file, and not a model", "did you mean Qwen/Qwen3-8B?"),
    ("recommend Qwen/Qwen3-8B --gpu 'A100 SXM'", "A100 80GB (80 GB), A100 40GB (40 GB)", '--gpu "A100 80GB"'),
    ("recommend Qwen/Qwen3-8B --gpu 4090 --length 0", "--length 0: must be from 2", "ftbench data MODEL --dataset"),
    ("estimate Qwen/Qwen3-8B --gpu 4090 --samples -5", "Invalid value for '--samples'", "estimate --help"),
    ("recommend Qwen/Qwen3-8B --gpu 4090 --prices p.yaml", "RTX 4090.rent.currency: is missing", "currency: USD"),
    ("recommend Qwen/Qwen3-8B --gpu 4090 --prices no.yaml", "no.yaml: no such file", "(see configs/prices.yaml)"),
    ("data Qwen/Qwen3-8B --dataset empty.jsonl", "empty.jsonl: the file is empty", "it needs a row per sample"),
    ("run Qwen/Qwen3-8B --dataset no.jsonl", "--dataset no.jsonl: no such file", "ftbench list datasets"),
    ("run Qwen/Qwen3-8B --set train.max_length=9", "train.max_length: no such key", "did you mean dataset.max_length?"),
    ("init Qwen/Qwen3-8B --gpu 4090", "init: needs --dataset without a terminal", "ftbench init Qwen/Qwen3-8B"),
    ("recommend Qwen/Qwen3-8B --gpu 4090 --prices .", ".: a folder, not a file", "(see configs/prices.yaml)"),
    ("sweep --status p.yaml", "p.yaml: a file, not a folder", "name the folder of the sweep"),
    ("sweep --status .", "no sweep found", "name the folder of the sweep"),
    ("import p.yaml --name a --model m --method lora --gpu ''", "--gpu is empty", "name the model, and the GPU or cpu"),
])  # fmt: skip
def test_bad_input_gets_a_fact_and_a_next_step(ftbench, tmp_path, monkeypatch, command, fact, fix):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "p.yaml").write_text("RTX 4090: {rent: {per_hour: 1.0, date: 2026-01-01, source: x}}\n")
    code, out, err = ftbench(*shlex.split(command))
    assert (code, out) == (2, "")
    assert fact in err
    assert fix in err


def test_init_asks_again_if_the_answer_is_not_a_number(ftbench, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("many\n50\n"))
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    options = ("--dataset", "300", "--gpu", "4090", "-o", tmp_path / "run.yaml")
    assert ftbench("init", "tiny/llama", *options)[0] == 0
    assert "samples: 50" in (tmp_path / "run.yaml").read_text()


@pytest.mark.parametrize(("answers", "problem", "not_asked"), [
    ("missing.jsonl\n", "missing.jsonl: no such file", "Which GPU?"),
    ("-600\n", "must be from 2 to 524,288", "Which GPU?"),
    ("300\nfoo\n", "foo: not in the table", "How many samples"),
    ("300\n4090\n-5\n", "--samples -5: must be at least 1", "nothing"),
])  # fmt: skip
def test_init_ends_at_the_first_wrong_answer(ftbench, tmp_path, monkeypatch, answers, problem, not_asked):
    monkeypatch.setattr(sys, "stdin", io.StringIO(answers))
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    code, _, err = ftbench("init", "tiny/llama", "-o", tmp_path / "run.yaml")
    assert (code, problem in err, not_asked in err) == (2, True, False)


@pytest.fixture
def slow(tmp_path):
    """A store in which one run waited for its CPU, one for its data, and one did not wait."""
    make_run(tmp_path, "lora-b4-r1", steps(seconds=0.5, seed=1, gpu_busy=0.99, tensor_busy=0.6, memory_busy=0.3),
             spec={"optimizations.compile": True})  # fmt: skip
    make_run(tmp_path, "lora-b4-r2", steps(seconds=2.0, seed=2, gpu_busy=0.35))
    make_run(
        tmp_path, "lora-b4-r3", steps(seconds=2.5, seed=3, gpu_busy=0.3, data_time_s=1.6), spec={"dataset.seed": 7}
    )
    return tmp_path


def test_why_was_my_run_slow(ftbench, slow, tmp_path):
    """The slowest run has a number, its card names the bottleneck, and its advice can be typed as options."""
    code, out, _ = ftbench("report", slow, "--sort=-tokens/s", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    numbers = [row["number"] for row in rows]
    assert (code, numbers) == (0, ["3", "2", "1"])
    assert [row["bound.verdict"] for row in rows][:2] == ["data-bound", "launch-bound"]

    waited, launched = (ftbench("show", number, slow)[1] for number in numbers[:2])
    assert "data-bound" in waited
    assert "64 % of the steady window was spent waiting for batches" in words(waited)
    assert "--set optimizations.loader_processes=on" in waited
    assert "launch-bound" in launched
    assert "the GPU worked 35 % of the time and waited for the CPU the rest of the time" in words(launched)
    assert "--set optimizations.compile=on" in launched

    lines = waited.replace("\\\n", "").splitlines()
    commands = [line.strip() for line in lines if line.strip().startswith("ftbench run ")]
    assert commands
    for line in commands:
        pretended = ["--set", "launch.mock=ok", "--out", tmp_path / "out"]
        assert ftbench(*shlex.split(line)[1:], *pretended)[0] == 0


def test_is_a_blackwell_or_an_h100_better_of_two_stores(ftbench, tmp_path):
    """The runs of one machine come as a bundle. One command compares speed, certainty, memory, cost."""
    blackwell, h100 = (tmp_path / name for name in ("blackwell", "h100"))
    names = {blackwell: "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", h100: "NVIDIA H100 PCIe"}
    for store, seconds in ((blackwell, 0.5), (h100, 0.4)):
        for number in (1, 2, 3):
            rows = steps(seconds=seconds, seed=number)
            make_run(store, f"lora-b4-{store.name}-r{number}", rows, machine=gpu(names[store]))

    code, _, err = ftbench("bundle", h100, "-o", tmp_path / "h100.tar.zst")
    assert (code, err) == (0, "")
    prices = RESULTS.parents[1] / "configs/prices-example.yaml"
    options = ["--compare", "gpu", "--baseline", "Blackwell", "--prices", prices]
    code, out, _ = ftbench("report", blackwell, tmp_path / "h100.tar.zst", *options, "--wide")
    assert code == 0
    (line,) = (line for line in out.splitlines() if "H100 PCIe" in line and "nothing" in line)
    change = re.search(r"\+([\d.]+) % \[\+([\d.]+), \+([\d.]+)\]", line)
    assert change
    value, low, high = map(float, change.groups())
    assert low < value < high
    assert value == pytest.approx(25, abs=1.5)  # 0.5 s against 0.4 s
    assert "1M tokens" in out
