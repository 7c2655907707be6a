"""Check that the README is short, that each page is linked, and that what the pages show works."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import statistics
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from ftbench.cli import app
from ftbench.cluster import load_settings
from ftbench.core.hardware import find_gpu
from ftbench.estimate.recommend.ranking import Goal, recommend
from ftbench.estimate.time.duration import FORMULA, SHEET, _spread
from ftbench.facts import read_facts
from ftbench.report.build import Request, report
from ftbench.spec.experiment import Experiment
from ftbench.spec.load import load, spec_keys
from ftbench.spec.sweep import cells

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def blocks(language: str) -> list[pytest.param]:
    """Return the text of each code block in a language, with the name of its page."""
    found = [
        (page, text) for page in PAGES for kind, text in BLOCK.findall(page.read_text("utf-8")) if kind == language
    ]
    return [pytest.param(text, id=f"{page.name} {index}") for index, (page, text) in enumerate(found)]


def typed() -> list[str]:
    """Return each ftbench command in a shell block."""
    lines = [line for block in blocks("sh") for line in block.values[0].splitlines()]
    return sorted({line.partition("  #")[0].strip() for line in lines if line.startswith("ftbench ")})


def mentioned() -> list[str]:
    """Return each ftbench command in backticks; its arguments may be left out."""
    return sorted({code for page in PAGES for code in re.findall(r"`(ftbench \w[^`]*)`", page.read_text("utf-8"))})


def command_of(words: list[str]) -> typer.core.TyperCommand:
    group = typer.main.get_command(app)
    return group.resolve_command(group.make_context("ftbench", words), words)[1]


def test_readme_is_short():
    assert len(README.splitlines()) <= 90


def test_page_is_linked_from_the_readme_or_the_index():
    index = ROOT / "docs/README.md"
    links = {(index.parent / link).resolve() for link in LINK.findall(index.read_text("utf-8"))}
    links |= {(ROOT / link).resolve() for link in LINK.findall(README)}
    assert [page for page in PAGES[1:] if page not in links] == []


def test_links_lead_to_files():
    links = [(page, link) for page in PAGES for link in LINK.findall(page.read_text("utf-8"))]
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []


def test_named_source_paths_exist():
    named = re.compile(r"`((?:src|scripts|tests|configs|docs)/[\w./-]+)")
    paths = [(page.name, path) for page in PAGES for path in named.findall(page.read_text("utf-8"))]
    assert [(page, path) for page, path in paths if not (ROOT / path).exists()] == []


def test_shown_commands_exist():
    for line in typed():
        words = shlex.split(line)[1:]
        if words != ["--version"]:
            command_of(words).make_context(words[0], words[1:])


def test_options_of_mentioned_commands_exist():
    for line in mentioned():
        words = shlex.split(line.replace("…", ""))[1:]
        options = {option for parameter in command_of(words).params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options, line


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """Change to a directory with the specs of the pages, some results and the price file."""
    for page, name in (("README.md", "my-run.yaml"), ("docs/tutorial/first-runs.md", "first.yaml")):
        (text,) = re.findall(rf"```yaml\n# {name}\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
        (tmp_path / name).write_text(text, "utf-8")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in ("first", "run"):  # the folders of first.yaml and run.yaml
        shutil.copytree(ROOT / "results" / "h200" / "headline" / "full", tmp_path / "results" / name)
    monkeypatch.chdir(tmp_path)


WITHOUT_RUNS = re.compile(r"ftbench (estimate|recommend|list) (?!.*(spec\.yaml|…))")
WITH_RUNS = re.compile(r"ftbench (bundle|verify|report) (?!.*(h200/|--baseline|--compare gpu|NEW))")


def options_of(line: str) -> set[str]:
    words = shlex.split(line)
    return {f"{words[1]} {word}" for word in words[2:] if words[1] == "list" or word.startswith("-")}


def estimates() -> list[pytest.param]:
    """Return estimates and lists. If others have the options of a line, only the exhaustive suite runs it."""
    lines = sorted(filter(WITHOUT_RUNS.match, {*typed(), *mentioned()}))
    # test_shown_output_is_current runs these.
    tried = set().union(*(options_of(block.values[0].partition("\n")[0].lstrip("$ ")) for block in blocks("console")))
    found = []
    for line in sorted(lines, key=lambda line: len(options_of(line)), reverse=True):
        found.append(pytest.param(line, marks=[pytest.mark.exhaustive] * (options_of(line) <= tried)))
        tried |= options_of(line)
    return found


@pytest.mark.parametrize("line", estimates())
def test_shown_estimates_and_lists_run(reader, ftbench, line):
    code, printed, errors = ftbench(*shlex.split(line)[1:])
    assert (code, errors) == (0, "")
    assert printed


@pytest.mark.parametrize("page", ["README.md", "first-runs.md"])
def test_shown_reports_and_bundles_run(reader, ftbench, page):
    lines = [line for block in blocks("sh") if block.id.startswith(page) for line in block.values[0].splitlines()]
    shown = [line.partition("  #")[0] for line in lines if WITH_RUNS.match(line)]
    assert shown
    for line in shown:
        code, _, errors = ftbench(*shlex.split(line)[1:])
        assert (code, errors) == (0, ""), line


@pytest.mark.parametrize("text", blocks("console"))
def test_shown_output_is_current(reader, ftbench, monkeypatch, text):
    """The last line `…` stands for the rest of the output. `scripts/console` writes the output again."""
    monkeypatch.setenv("COLUMNS", "100")
    command, _, shown = text.removeprefix("$ ").partition("\n")
    code, printed, _ = ftbench(*shlex.split(command)[1:])
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    assert code == 0
    assert shown.splitlines()[:-1] == lines[: len(shown.splitlines()) - 1]


@pytest.mark.parametrize("text", blocks("yaml"))
def test_shown_specs_load(text, tmp_path):
    for name in set(re.findall(r"path: (\w+\.jsonl)|recipe: (\w+\.yaml)", text)):
        (tmp_path / "".join(name)).touch()
    path = tmp_path / "spec.yaml"
    if "partition:" in text:
        path.write_text(text, "utf-8")
        assert load_settings(f"slurm:{path}", path)
        return
    if "apiVersion:" in text:
        pytest.skip("a Kubernetes file, not a spec")
    path.write_text(text if re.search(r"^model:", text, re.MULTILINE) else f"model: tiny/qwen3\n{text}", "utf-8")
    if "sweep:" in text:
        assert cells(path, [])
    else:
        assert load(path)


@pytest.mark.parametrize(
    "script",
    [
        "reference",
        "two-machines",
        "studies/two-gpus",
        "studies/frameworks",
        "studies/slow-host",
        "studies/founding-text",
        "studies/founding-images",
    ],
)
def test_generated_page_is_current(script, monkeypatch):
    monkeypatch.setattr(sys, "path", [str((ROOT / "scripts" / script).parent), *sys.path])
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
    assert not end.value.code


def test_guide_states_the_tokens_per_step_that_fp8_needs():
    """The sentence agrees with the runs, and `ftbench recommend` with the sentence."""
    said = " ".join((ROOT / "docs/how-to/choose-a-card.md").read_text("utf-8").split())
    sentence = said.partition("**Few tokens per step?**")[2].partition("**Few steps?**")[0]
    rates = {}
    for path in (ROOT / "results/h200/headline").glob("*/*/summary.json"):
        spec, summary = (json.loads((path.parent / name).read_text()) for name in ("spec.json", "summary.json"))
        if path.parts[-3] in ("full", "short-equal") and spec["optimizations"]["fused_lora"]:
            tokens = spec["train"]["batch_size"] * spec["dataset"]["max_length"]
            found = rates.setdefault((tokens, spec["optimizations"]["fp8"] != "off"), [])
            found.append(summary["tokens_per_s"]["real"])
    assert sorted(rates) == [(2048, False), (2048, True), (8192, False), (8192, True)]
    for (tokens, _), found in rates.items():
        assert f"{tokens:,} tokens per step" in sentence
        assert f"{statistics.geometric_mean(found):,.0f}" in sentence
    for rows, eight in ((1, False), (4, True)):
        spec = Experiment.model_validate({
            "name": "night", "model": {"id": "Qwen/Qwen3-8B", "weights": "random"}, "method": {"name": "lora"},
            "train": {"batch_size": rows},
            "dataset": {"name": "synthetic", "samples": 500, "mean_length": 2048, "max_length": 2048},
        })  # fmt: skip
        best = recommend(Goal(spec, (find_gpu("H200 SXM"),), 500, methods=("lora",), effective_batch=rows)).options[0]
        assert (best.spec.optimizations.fp8 != "off") is eight


def test_the_page_on_estimates_states_the_ranges_of_the_time():
    """The factors are those of estimates, for steps that only the GPU or only the host limits."""
    text = " ".join((ROOT / "docs/explanation/estimates.md").read_text("utf-8").split())
    spec = Experiment.model_validate({"name": "x", "model": {"id": "Qwen/Qwen3-8B"}, "method": {"name": "lora"}})
    slower = read_facts("durations.yaml")["spread"] | {"GPU": 1.0}
    gpu, host, known = ([_spread(spec, basis, False, slower[key])[0] for basis in (FORMULA, SHEET)]
                        for key in ("GPU", "host", "known host"))  # fmt: skip
    formula, sheet = (f"{100 * factor - 100:.0f} %" for factor in gpu)
    assert f"5 % (`measured`), {formula} (`formula`) and {sheet} (`data sheet`)" in text
    assert "a factor of {:.1f} (`formula`) or {:.1f} (`data sheet`)".format(*host) in text
    assert "factors are {:.1f} and {:.1f}.".format(*known) in text
    assert "range is from {:.1f} to {:.1f} times".format(1 / slower["start"], slower["start"]) in text
    page = (ROOT / "docs/evidence/time-estimates.md").read_text("utf-8")
    before, after = re.findall(r"hosts \(median error ([\d.]+) %|launch-bound estimates is ([\d.]+) %", page)
    assert f"from {float(before[0]):.0f} % to {float(after[1]):.0f} %" in text
    covered = re.search(r"contain ([\d.]+) % of the runs of this model", page)
    assert f"They contain {float(covered[1]):.0f} % of the times of the model that was left out." in text
    memory = (ROOT / "docs/evidence/memory-estimates.md").read_text("utf-8")
    inside = sorted(float(each) for each in re.findall(r"^\| held out .* ([\d.]+) % \|$", memory, re.MULTILINE))
    shares = " to ".join(dict.fromkeys(f"{each:.0f}" for each in (inside[0], inside[-1])))
    assert f"They contain {shares} % of the measurements" in text
    change = " ".join((ROOT / "CHANGELOG.md").read_text("utf-8").split())
    assert f"from {float(before[0]):.0f} % to {float(after[1]):.0f} %. Without such runs" in change
    assert f"the range is a factor of {host[0]:.1f}." in change
    share = re.search(r"of their estimate \(([\d.]+) %\)", (ROOT / "docs/evidence/published.md").read_text("utf-8"))
    assert f"GPUs: {float(share[1]):.0f} % of these figures" in text


def test_the_page_on_images_states_what_the_kernels_save():
    text = " ".join((ROOT / "docs/how-to/images.md").read_text("utf-8").split())
    runs = {path.parents[1].name: json.loads(path.read_text("utf-8"))["step_time_s"]["median"]
            for path in (ROOT / "results/h200/images-kernels").glob("*/*/summary.json")}  # fmt: skip
    saved = {
        round(100 * (1 - runs[kernels] / runs[plain]))
        for kernels, plain in (("kernels", "base"), ("kernels-fp8", "fp8"))
    }
    assert f"shortens the steps of LLaVA-NeXT by {saved.pop()} % with 16-bit and with 8-bit products" in text
    assert not saved


def test_pictures_are_small():
    assert (ROOT / "docs" / "report.png").stat().st_size <= 300_000
    assert (ROOT / "docs" / "two-machines.png").stat().st_size <= 200_000


def test_glossary_has_each_report_heading():
    """Columns of spec keys are documented by `ftbench list keys`; batches are numbers."""
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/reference/glossary.md").read_text("utf-8"), re.MULTILINE)
    known = f", {', '.join(rows)}, ".replace("`", "").replace(" …", "").casefold()
    folders = ("headline/full", "several-gpus", "qwen3-8b-frontier", "profiles")
    paths = [ROOT / "results/h200" / name for name in folders]
    prices = ROOT / "configs/prices-example.yaml"
    text = report(Request(paths, "md", answers=True, prices=prices)).text
    text += report(Request(paths[:1], "md", "recipe")).text
    heads = [above for above, below in pairwise(text.splitlines()) if below.startswith("|-")]
    keys = {end for key, *_ in spec_keys() for end in (key, key.rpartition(".")[2].replace("_", " "))}
    headings = {cell for line in heads for cell in line.strip("| ").split(" | ")} - keys
    assert len(headings) > 30
    missing = sorted(name for name in headings if not name.isdigit() and f", {name.casefold()}, " not in known)
    assert not missing, f"docs/reference/glossary.md lacks {missing}"
