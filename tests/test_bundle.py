"""Bundles: the same runs give the same bytes, no secret leaves, a changed figure is found, a hostile archive is refused
with a sentence and writes nothing outside of its folder."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import warm
from ftbench.core import rows
from ftbench.errors import SpecError
from ftbench.store import bundle, rundir, summary
from ftbench.store.ranks import write_merged
from ftbench.store.rundir import RunDir
from ftbench.store.steps import StepsWriter, read_steps
from ftbench.store.verify import verify

zstd = bundle.zstd
COMMITTED = Path(__file__).parents[1] / "results" / "h200"
# Put together here: a key in one piece would be found by those who look for leaked ones.
KEYS = {
    "HF_TOKEN": "hf_" + "AbCdEfGhIj" * 3, "WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567",
    "MY_PASSWORD": "correct horse battery", "OPENAI_API_KEY": "sk-" + "proj-" + "x1y2" * 8,
}  # fmt: skip


def made_run(folder: Path, name: str = "lora-b4-r1", seconds: float = 0.5) -> RunDir:
    """A run of twenty steps, written by the code that writes a real one's files."""
    run = rundir.create_at(folder / "study" / name)
    rundir.write_json(run.spec_json, {"name": "study", "method": {"name": "lora"}, "model": {"id": "tiny/qwen3"},
                                      "train": {"batch_size": 4, "gradient_accumulation_steps": 1}})  # fmt: skip
    rundir.write_json(run.machine, {"gpu": {"name": "NVIDIA H200"}})
    rundir.write_json(run.applied, {"parameters": {"total": 100, "trainable": 10}})
    run.spec_yaml.write_text("model: tiny/qwen3\n")
    run.log.write_text("loading\n")
    (run.path / "adapter").mkdir()
    (run.path / "adapter" / "adapter_model.safetensors").write_bytes(b"\0" * 100)
    writer = StepsWriter(run.steps)
    writer.append(
        rows.StepRow(step=i, elapsed_time_sec=seconds * i, phase="train", step_time_s=seconds, real_tokens=1000,
                     padded_tokens=1200, label_tokens=700, samples=4, loss=2.0, energy_j=50.0, power_w=100.0)
        for i in range(1, 21)
    )  # fmt: skip
    writer.close()
    rundir.write_json(run.state, {"schema": 1, "state": "ok", "ended_at": "2026-01-02T03:04:05Z", "wall_s": 11.0})
    rundir.write_json(run.summary, summary.as_dict(summary.summarise(run)))
    return run


@pytest.fixture
def runs(tmp_path) -> Path:
    made_run(tmp_path / "results")
    made_run(tmp_path / "results", "qlora-b4-r1", seconds=0.7)
    return tmp_path / "results"


@pytest.fixture
def bundled(runs, tmp_path) -> Path:
    bundle.make([runs], tmp_path / "x.tar.zst")
    return tmp_path / "x.tar.zst"


def members(path: Path) -> dict[str, bytes]:
    with zstd.open(path, "rb") as packed, tarfile.open(fileobj=io.BytesIO(packed.read())) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar.getmembers()}


def test_a_run_whose_name_is_not_utf8_can_be_packed(tmp_path):
    run = made_run(tmp_path / "results")
    named = run.path.rename(os.fsdecode(os.fsencode(run.path) + b"\xff"))
    bundle.make([named], tmp_path / "x.tar.zst")
    with bundle.opened(tmp_path / "x.tar.zst") as folder:
        assert [each.run_id for each in rundir.find_runs(folder)] == [named.name]


def command(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return warm.run(arguments, os.environ | {"COLUMNS": "2000"} | variables)


# --- packing ---------------------------------------------------------------------------------------------------------


def test_manifest_has_every_file_with_its_hash(bundled):
    files = members(bundled)
    manifest = json.loads(files.pop("manifest.json"))
    assert manifest["schema"] == 1
    assert manifest["ftbench"]
    assert {name: entry["sha256"] for name, entry in manifest["files"].items()} == {
        name: hashlib.sha256(data).hexdigest() for name, data in files.items()
    }
    assert sorted({name.split("/")[2] for name in files}) == ["lora-b4-r1", "qlora-b4-r1"]
    assert {name.split("/", 3)[3] for name in files} == {
        "applied.json", "machine.json", "spec.json", "spec.yaml", "state.json", "steps.csv",
        "summary.json",
    }  # fmt: skip


def test_same_runs_give_the_same_bytes(runs, bundled, tmp_path):
    shutil.copytree(runs, tmp_path / "elsewhere" / "results")  # other dates, other inodes, another place
    bundle.make([tmp_path / "elsewhere" / "results"], tmp_path / "again.tar.zst")
    assert (tmp_path / "again.tar.zst").read_bytes() == bundled.read_bytes()
    bundle.make([runs / "study" / name for name in ("qlora-b4-r1", "lora-b4-r1")], tmp_path / "third.tar.zst")
    assert (tmp_path / "third.tar.zst").read_bytes() == bundled.read_bytes()


def test_files_of_all_ranks_are_bundled_and_verified(runs, tmp_path):
    run = RunDir(runs / "study" / "lora-b4-r1")
    steps, _ = read_steps(run.steps)
    for rank in range(2):
        writer = StepsWriter(run.of_rank(rank).steps)
        writer.append(dataclasses.replace(row, rank=rank, data_rank=rank) for row in steps)
        writer.close()
        applied = {"parallel": {"split": [1, 1], "busy_s": 3.0, "pass_s": 4.0}}  # of a pipeline
        rundir.write_json(run.of_rank(rank).applied, rundir.read_json(run.applied) | applied)
    run.steps.unlink()
    write_merged(run)
    rundir.write_json(run.summary, summary.as_dict(summary.summarise(run)))
    bundle.make([run.path], tmp_path / "x.tar.zst")
    assert {"steps.csv", "steps.rank0.csv", "steps.rank1.csv"} <= {
        Path(n).name for n in members(tmp_path / "x.tar.zst")
    }
    assert verify(tmp_path / "x.tar.zst").problems == []
    assert rundir.read_json(run.summary)["ranks"]["count"] == 2
    assert rundir.read_json(run.summary)["ranks"]["bubble"] == 0.25


def test_profile_tables_are_bundled_without_links_and_traces(runs, tmp_path):
    profile = runs / "study" / "lora-b4-r1" / "profile"
    profile.mkdir()
    (profile / "kernels.csv").write_text("kernel,ms\n")
    (profile / "trace.pt.gz").write_bytes(b"\0" * 10)
    (tmp_path / "private.json").write_text("{}")
    (profile / "link.json").symlink_to(tmp_path / "private.json")
    bundle.make([runs], tmp_path / "x.tar.zst")
    assert [n for n in members(tmp_path / "x.tar.zst") if "/profile/" in n] == [
        "runs/study/lora-b4-r1/profile/kernels.csv"
    ]


def test_running_run_is_skipped_and_named(runs, tmp_path):
    going = rundir.create_at(runs / "study" / "going-r1")
    made = bundle.make([runs], tmp_path / "x.tar.zst")
    assert (made.runs, made.left_out) == (2, [str(going.path.resolve())])
    with pytest.raises(SpecError, match="still running"):
        bundle.make([going.path], tmp_path / "y.tar.zst")


def test_folder_that_cannot_be_read_is_named(runs, tmp_path, monkeypatch):
    locked, scandir = str(runs / "study" / "lora-b4-r1"), os.scandir

    def scanned(path):  # root can read every folder
        if str(path) == locked:
            raise PermissionError(13, "Permission denied", locked)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scanned)
    with pytest.raises(SpecError, match=f"^{locked}: cannot be read"):
        bundle.make([runs], tmp_path / "x.tar.zst")


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_folder_without_runs_is_an_error(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match=name):
        bundle.make([tmp_path / name], tmp_path / "x.tar.zst")
    assert not (tmp_path / "x.tar.zst").exists()


def test_existing_file_is_kept_without_force(runs, tmp_path):
    archive = tmp_path / "h100.tar.zst"
    archive.write_text("the runs of another machine")
    done = command("bundle", runs, "-o", archive)
    assert (done.returncode, archive.read_text()) == (2, "the runs of another machine")
    assert "the file exists; add --force to overwrite it" in done.stderr
    assert command("bundle", runs, "-o", archive, "--force").returncode == 0


# --- secrets ---------------------------------------------------------------------------------------------------------


def test_bundle_has_no_secret(runs, tmp_path):
    run = RunDir(runs / "study" / "lora-b4-r1")
    run.spec_yaml.write_text(
        f"# HF_TOKEN={KEYS['HF_TOKEN']}\n# api_key: 'my own key 17'\nmodel: tiny/qwen3\n"
        "dataset: {path: 'https://me:pass%20word@example.com/data'}\n"
    )
    rundir.write_json(run.applied, {"warnings": [*KEYS.values(), "Authorization: Bearer abcdefghijklmnop0123"]})
    rundir.write_json(run.state, rundir.read_json(run.state) | {"reason": f"login with {KEYS['WANDB_API_KEY']} failed"})
    done = command("bundle", runs, "-o", tmp_path / "x.tar.zst", **KEYS)
    assert done.returncode == 0, done.stderr
    everything = b"".join(members(tmp_path / "x.tar.zst").values()).decode()
    for secret in (*KEYS.values(), "my own key 17", "pass%20word", "abcdefghijklmnop0123"):
        assert secret not in everything
    assert "secrets redacted" in done.stdout
    assert "me:[redacted]@example.com" in everything


# --- verifying -------------------------------------------------------------------------------------------------------


def test_committed_runs_verify(tmp_path):
    """Some have warnings in earlier words, several ranks, or images. No figure or version looks like a secret."""
    folders = [COMMITTED / name for name in ("headline-first", "several-gpus", "images")]
    assert bundle.make(folders, tmp_path / "x.tar.zst").redacted == 0
    found = verify(tmp_path / "x.tar.zst")
    assert found.problems == []
    assert found.runs == sum(len(rundir.find_runs(folder)) for folder in folders) > 30
    assert found.figures > 100 * found.runs


def test_verify_reports_success(bundled):
    done = command("verify", bundled)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 runs, 14 files" in done.stdout
    assert "every hash and every figure agrees" in done.stdout


def test_changed_figure_is_named(runs, tmp_path):
    run = RunDir(runs / "study" / "lora-b4-r1")
    written = rundir.read_json(run.summary)
    changes = {
        "samples_per_hour": 30_000.0, "step_time_s.median": 0.499, "energy.joules": None, "state": "oom",
        "steps.total": 21, "first_step_s": 0.5000001, "step_time_s.ci95": [0.4, 0.6], "mfu": 0.5,
    }  # fmt: skip
    for key, value in changes.items():
        *sections, last = key.split(".")
        part = written
        for name in sections:
            part = part[name]
        part[last] = value
    rundir.write_json(run.summary, written)
    bundle.make([runs], tmp_path / "x.tar.zst")
    done = command("verify", tmp_path / "x.tar.zst", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)["problems"]
    assert all("study/lora-b4-r1: " in problem and "in summary.json, computed: " in problem for problem in found)
    named = [problem.partition("lora-b4-r1: ")[2] for problem in found]
    assert [key for key in changes if not any(each.startswith(key) for each in named)] == []
    assert [each for each in named if not each.startswith(tuple(changes))] == []


def test_removed_warning_is_named(runs, tmp_path):
    run = RunDir(runs / "study" / "lora-b4-r1")
    rundir.write_json(run.machine, {"gpu": {"name": "NVIDIA H200", "ecc_uncorrected": 3}})
    bundle.make([runs], tmp_path / "x.tar.zst")
    (problem,) = verify(tmp_path / "x.tar.zst").problems
    assert "lacks the warning: the GPU has counted 3 uncorrected memory errors" in problem


# --- unchecked runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "code", "said"),
    [
        ({}, 1, "the bundle contains no run"),
        ({"runs/a/b/state.json": b'{"state": "ok"}'}, 0, "not checked: a/b: has no summary to compare with its steps"),
        ({"runs/a/b/state.json": b'{"state": "ok"}', "runs/a/b/summary.json": b'{"schema": 0}'}, 0, "another version"),
    ],
)  # fmt: skip
def test_runs_that_cannot_be_compared_are_named(tmp_path, files, code, said):
    done = command("verify", packed(tmp_path / "y.tar.zst", files))
    assert (done.returncode, done.stderr) == (code, "")
    assert said in done.stdout
    assert "every hash and every figure agrees" not in done.stdout


def test_figures_per_gpu_are_not_checked_without_the_steps_of_other_gpus(tmp_path):
    bundle.make([Path("results/h100/two-gpus/fsdp-14b-full")], tmp_path / "x.tar.zst")
    verdict = verify(tmp_path / "x.tar.zst")
    assert (verdict.problems, len(verdict.unchecked)) == ([], 1)
    assert verdict.figures > 100
    assert "because the steps of the other GPUs are missing" in verdict.unchecked[0]


def packed(
    path: Path, files: dict[str, bytes], infos: list[tarfile.TarInfo] | None = None, hashes: bool = True
) -> Path:
    """An archive as anyone may make one."""
    entries = {
        name: {"sha256": hashlib.sha256(data).hexdigest() if hashes else "0" * 64} for name, data in files.items()
    }
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in {"manifest.json": json.dumps({"schema": 1, "files": entries}).encode(), **files}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in infos or []:
            tar.addfile(info)
    path.write_bytes(zstd.compress(out.getvalue()))
    return path


def test_replaced_file_is_found(bundled, tmp_path):
    files = members(bundled)
    del files["manifest.json"]
    other = packed(tmp_path / "y.tar.zst", files, hashes=False)
    done = command("verify", other)
    assert done.returncode == 1
    assert "steps.csv: its SHA-256 is" in done.stdout
    report = command("report", other)
    assert (report.returncode, report.stdout) == (2, "")
    assert "damaged: " in report.stderr


# --- reporting -------------------------------------------------------------------------------------------------------


def test_report_reads_a_bundle_and_a_folder(bundled, tmp_path):
    made_run(tmp_path / "here", "full-b4-r1", seconds=1.0)
    done = command("report", bundled, tmp_path / "here", "--format", "json")
    assert done.returncode == 0, done.stderr
    found = {run["run_id"]: run["step_time_s.median"] for run in json.loads(done.stdout)["runs"]}
    assert found == pytest.approx({"lora-b4-r1": 0.5, "qlora-b4-r1": 0.7, "full-b4-r1": 1.0})
    paths = {run["path"] for run in json.loads(done.stdout)["runs"]}
    assert paths == {
        f"{bundled}:study/lora-b4-r1", f"{bundled}:study/qlora-b4-r1", str(tmp_path / "here" / "study" / "full-b4-r1"),
    }  # fmt: skip


def test_a_bundle_of_a_bundle_has_its_runs(bundled, tmp_path):
    made = bundle.make([bundled], tmp_path / "y.tar.zst")
    assert made.runs == 2
    assert (tmp_path / "y.tar.zst").read_bytes() == bundled.read_bytes()


# --- hostile archives ------------------------------------------------------------------------------------------------


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


HOSTILE = {
    "a path that leads out": (entry("runs/../../../ftbench-was-here"), "outside"),
    "a symbolic link": (entry("runs/a", tarfile.SYMTYPE, "/etc/passwd"), "is not an ordinary file"),
    "a hard link": (entry("runs/a", tarfile.LNKTYPE, "/etc/passwd"), "is not an ordinary file"),
    "a device": (entry("runs/a", tarfile.CHRTYPE), "is not an ordinary file"),
    "a sparse file": (entry("runs/a", tarfile.GNUTYPE_SPARSE), "is not an ordinary file"),
    "a second manifest": (entry("manifest.json"), "manifest.json"),
    "a file below a file": (entry("runs/x/y/z"), "cannot be unpacked"),
}


@pytest.fixture
def refused(tmp_path, monkeypatch) -> Callable[[Path], str]:
    """A function that reads a bundle, and returns the one sentence of the error. Nothing is left anywhere."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    def read(path: Path) -> str:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SpecError) as caught:
            verify(path)
        assert sorted(tmp_path.rglob("*")) == before
        assert not Path("/tmp/ftbench-was-here").exists()
        (sentence,) = caught.value.problems
        return sentence

    return read


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_entry_is_refused(tmp_path, refused, kind):
    info, said = HOSTILE[kind]
    assert said in refused(packed(tmp_path / "x.tar.zst", {"runs/x/y": b"{}"}, [info]))


def test_commands_refuse_a_hostile_bundle(tmp_path):
    path = packed(tmp_path / "x.tar.zst", {"runs/x/y": b"{}"}, [HOSTILE["a path that leads out"][0]])
    for verb in ("verify", "report"):
        done = command(verb, path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert "Traceback" not in done.stderr


def test_file_with_a_giant_size_in_its_header_is_refused(tmp_path, refused):
    info = entry("runs/a/b/steps.csv")
    info.size = bundle.MAX_FILE + 1
    path = tmp_path / "x.tar.zst"
    path.write_bytes(zstd.compress(info.tobuf(tarfile.GNU_FORMAT)))
    assert "too many files, or one too large for a run" in refused(path)


def test_compression_bomb_is_refused(tmp_path, monkeypatch):
    """Small in the archive, large unpacked: many files that together are too much."""
    monkeypatch.setattr(bundle, "MAX_TOTAL", 2**22)
    path = packed(tmp_path / "x.tar.zst", {f"runs/a/{i}/steps.csv": b"\0" * 2**20 for i in range(8)})
    assert path.stat().st_size < 2**15
    with tempfile.TemporaryDirectory() as folder, pytest.raises(SpecError, match="larger than"):
        bundle.unpack(path, Path(folder))


@pytest.mark.parametrize("place", ["a long name", "after the end"])
def test_compression_bomb_beside_the_files_is_refused(tmp_path, monkeypatch, place):
    """No header of a file states these bytes."""
    monkeypatch.setattr(bundle, "MAX_TOTAL", 2**22)
    name = entry("x" * 2**23 if place == "a long name" else "runs/a/b/steps.csv")
    path = tmp_path / "x.tar.zst"
    path.write_bytes(zstd.compress(name.tobuf(tarfile.GNU_FORMAT) + b"\0" * 2**23))
    with tempfile.TemporaryDirectory() as folder, pytest.raises(SpecError, match="larger than"):
        bundle.unpack(path, Path(folder))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x28\xb5\x2f\xfd" + b"\0" * 100])
def test_other_file_is_refused(tmp_path, refused, content):
    path = tmp_path / "x.tar.zst"
    path.write_bytes(content)
    assert "nor a file of `ftbench bundle`" in refused(path)


def test_truncated_bundle_is_refused(bundled, tmp_path):
    data = bundled.read_bytes()
    for length in range(4, len(data), len(data) // 10):
        path = tmp_path / f"{length}.tar.zst"
        path.write_bytes(data[:length])
        with pytest.raises(SpecError, match="damaged"):
            verify(path)


def test_other_archive_suffix_is_refused(tmp_path):
    made_run(tmp_path)
    with pytest.raises(SpecError, match=r"a bundle is a tar in zstd; name it x\.tar\.zst"):
        bundle.make([tmp_path], tmp_path / "x.tar.gz")
    assert not (tmp_path / "x.tar.gz").exists()
