"""Logs, bundles and files of reports contain no secrets."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from page_runs import made

from ftbench import cli
from ftbench.core.redact import REDACTED
from ftbench.store import bundle, rundir, summary
from ftbench.store.rundir import RunDir

TOKEN = "hf_" + "TokenOfAName" * 2
PASSWORD = "pa\"ss\\wo'rd_50"
PIECES = ("TokenOfAName", 'pa"ss', 'pa\\"ss', "wo'rd", "wo\\'rd", "wo&#x27;rd", "secret word", "quoted part", "s3cr3t")


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """Make a run with secrets in its name and its files, and a failed one with secrets in its reason."""
    monkeypatch.setenv("APP_DSN", PASSWORD)
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "runs"
    reason = (
        f'could not log in with {PASSWORD}, nor with api_key="secret word" at https://me:s3cr3t@example.com: {TOKEN}'
    )
    run = made(out, "lora", 4, name=f"study-{TOKEN}")
    for key, value in (("environment", {"OMP_NUM_THREADS": PASSWORD}), ("versions", {"torch": f"2+{TOKEN}"})):
        rundir.write_json(run.machine, rundir.read_json(run.machine) | {key: value})
    spec = rundir.read_json(run.spec_json)
    spec["dataset"] |= {"split": f"password='quoted part' {PASSWORD}"}
    rundir.write_json(run.spec_json, spec)
    rundir.write_json(run.applied, rundir.read_json(run.applied) | {"warnings": [reason]})
    run = RunDir(run.path.rename(run.path.with_name(f"lora-{TOKEN}-r1")))
    rundir.write_json(run.summary, summary.as_dict(summary.summarise(run)))
    made(out, "full", 8, state="error", reason=reason)
    return out


def left(capsys, monkeypatch, *arguments: object) -> str:
    """Return what a command prints on both streams."""
    monkeypatch.setattr(sys, "argv", ["ftbench", *map(str, arguments)])
    with pytest.raises(SystemExit):
        cli.main()
    printed = capsys.readouterr()
    return printed.out + printed.err


def test_the_log_of_a_run_contains_no_secret(tmp_path, capsys, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os; os.write(1, f'{os.environ[\"APP_DSN\"]} \\xff'.encode())")
    monkeypatch.setenv("APP_DSN", PASSWORD)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "spec.yaml").write_text("model: {id: tiny/qwen3, weights: random}\nlaunch: {mock: ok}\n")
    assert "ok" in left(capsys, monkeypatch, "run", tmp_path / "spec.yaml", "--out", tmp_path / "out")
    (log,) = tmp_path.glob("out/*/*/log.txt")
    assert log.read_text().startswith(f"{REDACTED} ")


def test_the_tables_of_a_sweep_contain_no_secret(tmp_path, capsys, monkeypatch):
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        f"name: study-{TOKEN}\nmodel: {{id: tiny/qwen3, weights: random}}\nlaunch: {{mock: ok}}\n"
        "sweep: {axes: {train.batch_size: [1]}}\n"
    )
    left(capsys, monkeypatch, "sweep", spec, "--out", tmp_path / "out")
    (table,) = tmp_path.glob("out/*/summary.md")
    assert table.read_text().startswith(f"# study-{REDACTED}-mock")
    assert TOKEN not in table.read_text() + table.with_suffix(".csv").read_text()


def test_no_report_in_a_file_contains_a_key(runs, tmp_path, capsys, monkeypatch):
    for format in ("table", "md", "csv", "json", "html"):
        left(capsys, monkeypatch, "report", runs, "--answers", "--format", format, "-o", tmp_path / format)
        text = (tmp_path / format).read_text("utf-8")
        assert REDACTED in text
        assert "TokenOfAName" not in text
    assert len(json.loads((tmp_path / "json").read_text("utf-8"))["runs"]) == 2


def test_a_bundle_contains_no_secret_even_in_file_names(runs, tmp_path, capsys, monkeypatch):
    archive = tmp_path / "x.tar.zst"
    left(capsys, monkeypatch, "bundle", runs, "-o", archive)
    content = bundle.zstd.decompress(archive.read_bytes()).decode("utf-8")
    assert f"runs/study-{REDACTED}/lora-{REDACTED}-r1/state.json" in content
    assert [piece for piece in PIECES if piece in content] == []
    said = left(capsys, monkeypatch, "verify", archive)
    assert "every hash and every figure agrees" in said
