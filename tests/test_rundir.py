import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftbench.core import processes, rows
from ftbench.core.rows import StepRow, header, to_csv
from ftbench.errors import MissingError
from ftbench.store import bundle, models, rundir
from ftbench.store.rundir import create, find_runs, read_json, read_state, write_json
from ftbench.store.steps import StepsWriter, read_steps
from waiting import fill

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS = [StepRow(step=i, phase="train", step_time_s=0.5, loss=2.0 - i / 10, throttle="none") for i in range(1, 5)]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# --- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch, step):
    write_json(tmp_path / "a.json", {"old": True})

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(rundir.os, step, fail)
    with pytest.raises(MissingError, match=r"a\.json: cannot be written \(Input/output error\)"):
        write_json(tmp_path / "a.json", {"old": False})
    assert read_json(tmp_path / "a.json") == {"old": True}
    assert names(tmp_path) == ["a.json"]


def test_nan_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "a.json", {"loss": math.nan})
    assert names(tmp_path) == []


@pytest.mark.parametrize("content", [b"{", b"[1, 2]", b"\xff\xfe", None])
def test_missing_or_invalid_file_is_empty(tmp_path, content):
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    assert read_json(tmp_path / "a.json") == {}


# --- claiming --------------------------------------------------------------------------------------------------------


def test_create_never_uses_an_existing_directory(tmp_path):
    runs = [create(tmp_path, "exp", "slug") for _ in range(3)]
    assert [run.run_id for run in runs] == ["slug-r1", "slug-r2", "slug-r3"]
    assert runs[0].path.parent == tmp_path / "exp"


def test_new_run_is_running_until_its_owner_dies(tmp_path):
    program = (
        "import sys, pathlib; from ftbench.store.rundir import create; create(pathlib.Path(sys.argv[1]), 'exp', 'slug')"
    )
    run = create(tmp_path, "exp", "slug")
    assert names(run.path) == [".reserve", "state.json"]
    assert read_state(run)["state"] == "running"
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True)
    runs = find_runs(tmp_path)
    assert [(found.run_id, read_state(found)["state"]) for found in runs] == [
        ("slug-r1", "running"),
        ("slug-r2", "interrupted"),
    ]


# --- steps.csv -------------------------------------------------------------------------------------------------------


@pytest.fixture
def steps(tmp_path):
    writer = StepsWriter(tmp_path / "steps.csv")
    writer.append(ROWS[:1])
    writer.append(ROWS[1:])
    writer.close()
    return tmp_path / "steps.csv"


def test_row_is_written_without_buffering(tmp_path):
    writer = StepsWriter(tmp_path / "steps.csv")
    writer.append(ROWS[:2])
    assert read_steps(tmp_path / "steps.csv") == (ROWS[:2], [])
    writer.close()


def test_torn_last_line_loses_only_itself(steps):
    whole = steps.read_bytes()
    last = len(to_csv(ROWS[-1]))
    for kept in range(1, last):
        steps.write_bytes(whole[: len(whole) - last + kept])
        found, warnings = read_steps(steps)
        assert found == ROWS[:-1], f"after {kept} bytes of the last line"
        assert warnings == ["steps.csv: the last line is not finished and was left out"]
    steps.write_bytes(whole[: len(whole) - last])
    assert read_steps(steps) == (ROWS[:-1], [])


GARBAGE = [
    b"\x00\xff\xfe\x00",
    b"",
    b'5,"an open quote',
    "\u2028\x85".encode(),
    header().encode().strip(),
    to_csv(ROWS[0]).encode().strip() + b",one too many",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_damaged_line_is_named_and_skipped(steps, garbage):
    lines = steps.read_bytes().splitlines(keepends=True)
    steps.write_bytes(b"".join([*lines[:3], garbage + b"\n", *lines[3:]]))
    found, warnings = read_steps(steps)
    assert found == ROWS
    assert warnings == ["steps.csv: line 4 cannot be read and was left out"]


def test_row_joined_to_a_torn_one_is_skipped(steps):
    """A full disk tears a line; the next append then lands on the same line."""
    lines = steps.read_bytes().splitlines(keepends=True)
    steps.write_bytes(b"".join([*lines[:2], lines[2][:9], *lines[3:]]))
    found, warnings = read_steps(steps)
    assert found == [ROWS[0], ROWS[3]]
    assert warnings == ["steps.csv: line 3 cannot be read and was left out"]


# --- states ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    return create(tmp_path, "exp", "slug")


def owned_by(pid, start, **other):
    state = rundir.running()
    return state | {"owner": state["owner"] | {"pid": pid, "start": start, **other}}


def test_run_of_another_live_process_is_running(run):
    with subprocess.Popen(["sleep", "60"]) as other:
        write_json(run.state, owned_by(other.pid, processes.process_start(other.pid)))
        before = read_state(run)["state"]
        other.kill()
        other.wait()
    assert (before, read_state(run)["state"]) == ("running", "interrupted")


@pytest.mark.parametrize(
    "owner",
    [{"start": 1}, {"boot": "another boot"}, {"host": "another-machine"}, {"pid": None}, {"pid": 2**22 + 1}],
    ids=str,
)
def test_run_of_another_identity_was_interrupted(run, owner):
    state = rundir.running()
    write_json(run.state, state | {"owner": state["owner"] | owner})
    found = read_state(run)
    assert found["state"] == "interrupted"
    assert "killed or the machine went down" in found["reason"]


@pytest.mark.parametrize("state", ["ok", "interrupted"])
def test_finished_run_keeps_its_state(run, state):
    write_json(run.state, {"state": state, "reason": "why"})
    assert read_state(run) == {"state": state, "reason": "why"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "state.json is missing or has an unknown state"),
        ("{", "state.json: not valid JSON (Expecting"),
        ('{"state": "dancing"}', "state.json is missing or has an unknown state"),
        ('{"state": "running", "owner": {"pid": "1"}}', "state.json: owner.pid: Input should be a valid integer"),
    ],
)
def test_invalid_state_is_an_error(run, content, reason):
    if content is None:
        run.state.unlink()
    else:
        run.state.write_text(content)
    state = read_state(run)
    assert state["state"] == "error"
    assert state["reason"].startswith(reason)


def test_the_folder_of_a_disk_for_lost_files_is_no_run(tmp_path):
    (tmp_path / "lost+found" / "x").mkdir(parents=True)
    (tmp_path / "lost+found" / "x" / "state.json").write_text("{}")
    assert find_runs(tmp_path) == []


def test_find_runs_below_a_folder(tmp_path):
    for slug in ("b", "a"):
        for _ in range(2):
            write_json(create(tmp_path, "exp", slug).state, {"state": "ok"})
    inner = tmp_path / "exp" / "a-r1" / "adapter"
    inner.mkdir()
    write_json(inner / "state.json", {"state": "ok"})
    (tmp_path / "exp" / "empty").mkdir()
    assert [run.run_id for run in find_runs(tmp_path)] == ["a-r1", "a-r2", "b-r1", "b-r2"]
    assert [run.run_id for run in find_runs(tmp_path / "exp" / "b-r2")] == ["b-r2"]
    assert find_runs(tmp_path / "nowhere") == []


def test_find_runs_follows_links_once(tmp_path):
    for name in ("here/a/1", "here/b/2", "elsewhere/c/3", "elsewhere/d/4"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "state.json").write_text("{}")
    here = tmp_path / "here"
    for link, target in {
        "a/latest": "../b/2", "a/up": "..", "root": "/", "c": "../elsewhere/c", "4": "../elsewhere/d/4",
        "no": "nowhere", "again": "../elsewhere",
    }.items():  # fmt: skip
        (here / link).symlink_to(target)
    assert sorted(run.path.resolve().name for run in find_runs(here)) == ["1", "2", "3", "4"]


# --- a full disk -----------------------------------------------------------------------------------------------------


def test_full_disk_still_takes_the_last_state(small_disk):
    run = create(small_disk, "exp", "slug")
    write_json(run.state, rundir.running())
    fill(small_disk)
    write_json(run.state, {"state": "error", "reason": "no space left on the disk"})
    assert read_state(run) == {"state": "error", "reason": "no space left on the disk"}
    assert not run.reserve.exists()
    assert names(run.path) == ["state.json"]


def test_full_disk_without_reserve_keeps_the_old_state(small_disk):
    run = create(small_disk, "exp", "slug")
    write_json(run.state, {"state": "ok"})
    run.reserve.unlink()
    fill(small_disk)
    with pytest.raises(MissingError, match="no space left on the disk; free some, or write elsewhere"):
        write_json(run.state, {"state": "error", "reason": "x" * 8192})
    assert read_state(run) == {"state": "ok"}
    assert names(run.path) == ["state.json"]


def test_full_disk_keeps_complete_lines(small_disk):
    run = create(small_disk, "exp", "slug")
    writer = StepsWriter(run.steps)
    writer.append(ROWS)
    fill(small_disk)
    with pytest.raises(MissingError, match="no space left on the disk"):
        writer.append(ROWS * 200)
    writer.close()
    found, warnings = read_steps(run.steps)
    assert found == (ROWS * 201)[: len(found)]
    assert len(found) >= len(ROWS)
    assert len(warnings) <= 1


def test_read_only_disk_error_names_the_file(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    said = r"/x\.json: cannot be written \(Read-only file system\); write elsewhere"
    with pytest.raises(MissingError, match=said):
        write_json(small_disk / "x.json", {})
    with pytest.raises(MissingError, match=said.replace("json", "tar\\.zst")):
        bundle.make([RESULTS / "h200" / "headline"], small_disk / "x.tar.zst")


# --- documents of others ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("pipe", "not a regular file of at most 64 MiB"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a":' * 600 + b"1" + b"}" * 600, "a: "),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON (Exceeds the limit (4300 digits)"),
        (b'{"b": {"a": ' + b"9" * 400 + b"}}", "b: Input should be a valid"),
        (b'{"a": [1e999]}', "a: Input should be a finite number"),
        (b'{"a": "\xff"}', "not valid JSON ('utf-8' codec can't decode"),
        (b'{"warnings": null}', "warnings: Input should be a valid list"),
        (b'{"batch_size": true}', "batch_size: Input should be a valid integer"),
        (b'{"outliers": [{"step": 1, "with": [3]}]}', "outliers.0.with.0: Input should be a valid string"),
    ],
)
def test_invalid_document_is_empty_with_the_reason(tmp_path, content, reason):
    path = tmp_path / "summary.json"
    if content == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    document, problem = rundir.read_document(path)
    assert document == rundir.read_json(path) == {}
    assert problem.startswith("summary.json: ")
    assert reason in problem


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("applied", {"resolved": [1]}, "resolved: Input should be a valid dictionary"),
        ("applied", {"resolved": {"a": 1}}, "resolved.a: Input should be"),
        ("kernels", {"steps": 0}, "steps: Input should be greater than or equal to 1"),
        ("kernels", {"phases": [{"phase": "data"}]}, "phases.0.cpu_ms: Field required"),
    ],
)
def test_values_that_commands_read_are_checked(tmp_path, name, changes, reason):
    committed = next(RESULTS.rglob(f"{name}.json"))
    assert rundir.read_document(committed)[1] is None
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(json.loads(committed.read_text()) | changes))
    document, problem = rundir.read_document(path)
    assert (document, problem.startswith(f"{name}.json: {reason}")) == ({}, True), problem


def test_model_has_every_field_of_a_summary():
    assert models.MODELS["summary.json"].model_fields.keys() | {"schema"} == rows.FIELDS | rows.LATER


def test_committed_files_fit_their_models():
    """Of each kind of file, one of each folder with runs."""
    found = [path for path in RESULTS.rglob("*.json") if models.model_of(path) is not models.FileModel]
    paths = [*{(path.parents[1], path.name): path for path in found}.values()]
    assert len(paths) > 800
    assert {path.parent.name for path in paths} > {"probe"}
    assert [problem for path in paths if (problem := rundir.read_document(path)[1])] == []
