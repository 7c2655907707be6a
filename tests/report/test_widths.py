"""Tables fit the terminal, rows have unique names, and --where and --sort select what is shown."""

from __future__ import annotations

import csv
import io
import re

import pytest
from rich.cells import cell_len

from ftbench.core.table import folded, text_table
from ftbench.report import build, formats, runs_table, select
from made_runs import MAX_Q, OOM, RESULTS, make_run, method, steps

WIDTHS = (80, 120, 160)
STORES = sorted(path.name for path in RESULTS.iterdir() if path.is_dir())
# These have repeats, failures, other frameworks, images, several GPUs and recipes with long names.
USUAL = {"headline", "frameworks", "images", "several-gpus", "kernels", "recipes", "qwen3-8b-frontier"}


def prices(folder):
    terms = "currency: USD, date: 2026-01-02, source: a shop"
    file = folder / "prices.yaml"
    file.write_text(f"H200 SXM:\n  rent: {{per_hour: 3.6, {terms}}}\n")
    return file


def mixed(folder):
    """Make runs that differ in model, method, rank, GPU and data, with repeats and a failure."""
    for repeat in (1, 2):
        make_run(folder, f"a-r{repeat}", steps(seed=repeat))
    make_run(folder, "b-r1", steps(seed=3), spec=method("qlora") | {"method.rank": 64})
    make_run(folder, "c-r1", steps(seed=4), machine={"gpu.name": MAX_Q}, spec={"optimizations.compile": True})
    make_run(folder, "d-r1", steps(seed=5), spec={"model.id": "meta-llama/Llama-3.1-70B-Instruct-with-a-long-name"})
    make_run(folder, "e-r1", steps(1), spec=method("full"), state=OOM)
    make_run(folder, "f-r1", steps(seed=6), spec={"dataset.seed": 7, "dataset.name": "日本語のデータ"})
    return folder


def too_wide(text, width):
    return [line for line in text.splitlines() if cell_len(line) > width]


@pytest.mark.parametrize(
    "store", [name if name in USUAL else pytest.param(name, marks=pytest.mark.exhaustive) for name in STORES]
)
def test_report_of_committed_runs_fits_the_terminal(monkeypatch, tmp_path, store):
    """Read the runs once and render them at each width."""
    drawn = []
    monkeypatch.setattr(build.formats, "render", lambda report, format_name: drawn.append(report) or "")
    build.report(build.Request([RESULTS / store], answers=True, prices=prices(tmp_path)))
    monkeypatch.undo()
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        assert too_wide(formats.render(drawn[0], "table"), width) == []


@pytest.mark.parametrize("options", [[], ["--compare", "method"], ["--rows", "merge"]], ids=" ".join)
def test_report_of_mixed_runs_fits_the_terminal(ftbench, monkeypatch, tmp_path, options):
    mixed(tmp_path)
    for width in (80, 160):
        monkeypatch.setenv("COLUMNS", str(width))
        code, out, _ = ftbench("report", tmp_path, *options)
        assert (code, too_wide(out, width)) == (0, [])


def test_pipe_and_wide_show_all_columns(ftbench, monkeypatch, tmp_path):
    mixed(tmp_path)
    piped = ftbench("report", tmp_path)[1]
    monkeypatch.setenv("COLUMNS", "80")
    assert "more columns: use --wide" in ftbench("report", tmp_path)[1]
    wide = ftbench("report", tmp_path, "--wide")[1]
    assert too_wide(wide, 160)
    assert [line.split() for line in wide.splitlines()][:8] == [line.split() for line in piped.splitlines()][:8]
    file = tmp_path / "report.txt"
    ftbench("report", tmp_path, "-o", file)
    assert too_wide(file.read_text(), 160)


def heading_of(out):
    return next(line for line in out.splitlines() if line.lstrip().startswith("#"))


def rows(out):
    """Return the rows of the table of runs by number."""
    return {line.split()[0]: line for line in out.splitlines() if re.match(r"\s*\d+  ", line)}


def test_results_come_first_and_rows_have_unique_names(ftbench, tmp_path):
    mixed(tmp_path)
    out = ftbench("report", tmp_path)[1]
    heading = heading_of(out)
    assert heading.split("  ", 1)[0].strip() == "#"
    assert heading.split()[:4] == ["#", "recipe", "tokens/s", "peak"]
    listed = list(csv.DictReader(io.StringIO(ftbench("report", tmp_path, "--format", "csv")[1])))
    assert sorted(rows(out), key=int) == [row["number"] for row in listed]
    assert len({row["label"] for row in listed}) == len(listed) == 7
    assert all(row["label"] in rows(out)[row["number"]] for row in listed)


def test_important_keys_come_first(ftbench, tmp_path):
    changes = {"measure.allow_fallback": True, "method.load_in_4bit": True, "method.rank": 64, "dataset.seed": 2}
    make_run(tmp_path, "a", spec=method("unsloth") | {"method.load_in_4bit": False})
    make_run(tmp_path, "b", spec=method("unsloth") | changes)
    heading = heading_of(ftbench("report", tmp_path)[1])
    places = [heading.index(name) for name in ("tokens/s", "load in 4bit", "rank", "seed", "allow fallback")]
    assert places == sorted(places)


def test_notes_refer_to_rows_and_count_the_rest(ftbench, tmp_path):
    for number in range(13):
        make_run(tmp_path, f"r{number:02}", steps(seed=number), spec={"dataset.seed": number},
                 applied={"warnings": [f"warning {chr(97 + number)}"]})  # fmt: skip
    out = ftbench("report", tmp_path)[1]
    notes = [line for line in out.splitlines() if line.startswith("note: ")]
    assert notes[0] == "note: #1: warning a"
    assert (len(notes), notes[-1]) == (11, "note: 3 more notes: use --format json")


def test_similar_notes_are_merged(ftbench, tmp_path):
    for number, watts in enumerate((789, 791.5, 789, 800)):
        make_run(tmp_path, f"r{number}", steps(seed=number), spec={"dataset.seed": number},
                 applied={"warnings": [f"single steps show up to {watts} W"]})  # fmt: skip
    notes = [line for line in ftbench("report", tmp_path)[1].splitlines() if line.startswith("note: ")]
    assert notes == ["note: #1, #3: single steps show up to 789 W (similar: #2, #4)"]


def test_a_row_with_several_runs_is_named_once_per_note():
    records = [{"state": "ok", "run_id": row, "warnings": [f"up to {watts} W"]} for row, watts in (
        ("a", 789), ("b", 791), ("a", 790), ("b", 789), ("c", 800), ("b", 792), ("c", 801))]  # fmt: skip
    assert runs_table._notes(records) == ["a: up to 789 W (similar: b, c)"]


def test_merged_row_has_the_warnings_of_all_repeats(ftbench, tmp_path):
    make_run(tmp_path, "a-r1", steps(seed=1))
    make_run(tmp_path, "a-r2", steps(seed=2), applied={"warnings": ["hot"]})
    make_run(tmp_path, "b-r1", steps(seed=3), spec=method("full"))
    out = ftbench("report", tmp_path, "--rows", "merge")[1]
    assert [line for line in out.splitlines() if "hot" in line] == ["note: #2: hot"]


# --- which runs, in which order, under which columns -----------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    make_run(folder, "a", steps(seconds=1.0, seed=1))
    make_run(folder, "b", steps(seconds=0.5, seed=2), spec=method("qlora") | {"method.rank": 16})
    make_run(folder, "c", steps(seconds=2.0, seed=3), spec=method("qlora"), machine={"gpu.name": MAX_Q})
    make_run(folder, "d", steps(1), spec=method("full"), state=OOM)
    return folder


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("method=lora,full", "ad"), ("method!=lora", "bcd"), ("method.rank=8", "ac"), ("gpu=RTX PRO", "c"),
        ("tokens/s>=8000", "ab"), ("memory_gb.allocated_peak < 1e3", "abc"), ("double_quant=true", "bc"),
        ("recipe=plain qlora", "bc"), ("model=Qwen/Qwen3-8B", "abcd"),
    ],
)  # fmt: skip
def test_where_keeps_matching_runs(ftbench, store, condition, kept):
    code, out, _ = ftbench("report", store, "--where", condition, "--format", "csv")
    assert code == 0
    assert {row["run_id"] for row in csv.DictReader(io.StringIO(out))} == set(kept)


def test_row_numbers_do_not_depend_on_filters(ftbench, store):
    every = rows(ftbench("report", store)[1])
    some = rows(ftbench("report", store, "--where", "method=qlora")[1])
    assert some.keys() < every.keys()


@pytest.mark.parametrize(("option", "order"), [("tokens/s", "bac"), ("-tokens/s", "cab"), ("first_step_s", "abc")])
def test_sort_puts_the_best_first_and_unknown_last(ftbench, store, option, order):
    out = ftbench("report", store, f"--sort={option}", "--format", "csv")[1]
    assert "".join(row["run_id"] for row in csv.DictReader(io.StringIO(out)))[:3] == order


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--where", "methd=lora"], "--where methd: unknown column; did you mean method?"),
        (["--where", "method"], "write it as method=lora, batch=4,8 or tokens/s>=5000"),
        (["--where", "rank=1"], "--where rank=1: no run matches; did you mean 16? (values: 8, 16)"),
        (["--where", "tokens/s>fast"], "> compares with a number"),
        (["--sort", "token/s"], "did you mean tokens/s?"),
        (["--sort", "rank", "--compare", "method"], "--sort applies to the table of runs"),
    ],
)  # fmt: skip
def test_unknown_name_is_an_error_with_the_nearest(ftbench, store, arguments, said):
    code, out, err = ftbench("report", store, *arguments)
    assert (code, out) == (2, "")
    assert said in err


# --- the table itself ------------------------------------------------------------------------------------------------


def test_last_columns_are_hidden_and_counted():
    columns = ["name", ">a", ">b", "words", ">c"]
    table = text_table(columns, [["the way it trains", "1" * 9, "2" * 9, "some words that fold", "3" * 9]], 50)
    assert table.endswith("\n2 more columns: use --wide")
    assert "3" * 9 not in table
    assert not too_wide(table, 50)


def test_columns_without_headings_are_never_hidden():
    assert "more column" not in text_table(["", ">", ""], [["a" * 40, "1", "b" * 40]], 40)


def test_paragraphs_wrap_at_the_terminal_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    assert max(map(len, folded("word " * 60).splitlines())) <= 50
    assert all(line.startswith("  w") for line in folded("  " + "word " * 60).splitlines()), "indented throughout"


def test_where_does_not_match_the_end_of_another_method(ftbench, tmp_path):
    make_run(tmp_path, "a", steps(seed=1), spec=method("qlora"))
    make_run(tmp_path, "b", steps(seed=2), spec=method("full"))
    out = ftbench("report", tmp_path, "--where", "method!=lora", "--format", "csv")[1]
    assert {row["run_id"] for row in csv.DictReader(io.StringIO(out))} == {"a", "b"}
    assert ftbench("report", tmp_path, "--where", "method=lora")[0] == 2


def test_where_reads_switches_of_records(tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seed=2), spec={"measure.share_gpu": True})
    records = [{"path": str(tmp_path / "made" / name), "state": "ok", "model": "m", "weights": "", "gpu": None,
                "optimizations": [], "method": "lora", "batch_size": 1, "contention.contended": name == "b"}
               for name in "ab"]  # fmt: skip
    for wanted in ("=true", "=True", "!=false", "=on"):
        assert [each["path"][-1] for each in select.matching(records, [f"contention.contended{wanted}"])] == ["b"]


def test_sort_by_a_field_puts_the_best_first(ftbench, tmp_path):
    make_run(tmp_path, "a", steps(seed=1, seconds=2.0))
    make_run(tmp_path, "b", steps(seed=2), spec={"method.rank": 16})
    for option, order in (("energy.joules_per_1k_samples", "ba"), ("-model_tflops", "ab")):
        out = ftbench("report", tmp_path, f"--sort={option}", "--format", "csv")[1]
        assert "".join(row["run_id"] for row in csv.DictReader(io.StringIO(out))) == order


def test_headings_of_varying_keys_select_and_sort(ftbench, tmp_path):
    make_run(tmp_path, "a", steps(seed=1))
    make_run(tmp_path, "b", steps(seed=2), spec={"dataset.seed": 5, "objective": {"name": "dpo", "beta": 0.1}})
    assert {"seed", "objective"} <= set(heading_of(ftbench("report", tmp_path)[1]).split())
    for condition in ("seed=5", "objective=dpo"):
        out = ftbench("report", tmp_path, "--where", condition, "--format", "csv")[1]
        assert [row["run_id"] for row in csv.DictReader(io.StringIO(out))] == ["b"]
