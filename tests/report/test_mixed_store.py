"""A store that mixes machines, cards, commits, lengths and broken runs: every answer uses comparable runs only."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mixed_store import mixed_store

from ftbench.estimate.time.history import RunHistory

SCRIPT = Path(__file__).with_name("mixed_answers.py")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return mixed_store(tmp_path_factory.mktemp("mixed"), count=100, seed=5)


@pytest.fixture(scope="module")
def expected(store):
    done = subprocess.run([sys.executable, SCRIPT, store], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_twenty_answers_agree_with_an_independent_script(store, expected, ftbench):
    document = json.loads(ftbench("report", store, "--format", "json")[1])
    answer, history = document["answer"], RunHistory.read(store)
    first, second, *_ = answer["records"]
    by_recipe = {record["recipe"]: record for record in answer["records"]}
    least = min(answer["records"], key=lambda record: record["peak_gb"])
    merged = list(csv.DictReader(io.StringIO(ftbench("report", store, "--rows", "merge", "--format", "csv")[1])))
    known = {run.run_id.split("/")[1] for run in history.runs if run.gpu == "H200 SXM"}
    told = {
        "runs": len(document["runs"]),
        "left out": answer["left_out"],
        "left out in all": int(re.search(r"Left out: (\d+) runs", answer["text"][-1])[1]),
        "recipes": len(answer["records"]),
        "winner": first["recipe"],
        "tokens/s": pytest.approx(first["tokens_per_s"], rel=1e-7),
        "low": pytest.approx(first["tokens_per_s_low"], rel=1e-7),
        "high": pytest.approx(first["tokens_per_s_high"], rel=1e-7),
        "runs of the winner": first["runs"],
        "samples/h": pytest.approx(first["samples_per_hour"], rel=1e-7),
        "next": second["recipe"],
        "times the next": pytest.approx(first["tokens_per_s"] / second["tokens_per_s"], rel=1e-7),
        "times plain": pytest.approx(first["ratio"], rel=1e-7),
        "least memory": least["recipe"],
        "its peak": pytest.approx(least["peak_gb"]),
        "its share of the speed": pytest.approx(least["tokens_per_s"] / first["tokens_per_s"], rel=1e-7),
        "rank of plain": list(by_recipe).index("plain") + 1,
        "rows of repeats": len(merged),
        "invalid on H200": sorted({run for run in expected["invalid on H200"] if run not in known}),
        "valid on H200": len(known),
    }
    assert len(told) == 20
    assert expected == told
    assert set(expected["left out"]) >= {
        "contended", "not finite", "failed", "unfinished", "out of memory", "of other data", "on other machines",
        "on other cards", "of other commits",
    }  # fmt: skip


def test_disturbed_and_broken_runs_lead_no_table(store, expected, ftbench):
    """They were made five times as fast as the others."""
    ranked = list(csv.DictReader(io.StringIO(ftbench("report", store, "--sort", "tokens/s", "--format", "csv")[1])))
    fastest = [row for row in ranked if float(row["tokens_per_s.real"] or 0) > 1.5 * expected["tokens/s"]]
    assert {row["contention.contended"] for row in ranked[:40]} == {"False"}
    assert {row["state"] for row in ranked[:40]} == {"ok"}
    assert len(fastest) >= 10


def test_show_ranks_comparable_runs_and_names_the_reason_otherwise(store, expected, ftbench):
    text = ftbench("show", "run-000-r0", store, "--wide")[1]
    assert f"plain is number {expected['rank of plain']} of 4 comparable recipes" in text
    disturbed = expected["invalid on H200"][0]
    assert re.search(r"left out of comparisons: (contended|not finite)", ftbench("show", disturbed, store)[1])
