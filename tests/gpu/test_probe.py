"""`ftbench probe` measures everything within a minute and twice the same on a GPU, and `ftbench doctor` finds no
problem: `pytest gpu/test_probe.py`."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from methods import CAPABILITY, ON_GPU

torch = pytest.importorskip("torch", reason="training libraries are not installed")

pytestmark = [*ON_GPU, pytest.mark.timeout(200)]
REPEATABLE = 0.02


def command(*arguments):
    done = subprocess.run([sys.executable, "-m", "ftbench", *arguments], stdout=subprocess.PIPE, text=True)
    return done.returncode, json.loads(done.stdout)


def probe(folder):
    """Return the document of a probe, and its seconds."""
    begun = time.monotonic()
    code, document = command("probe", "--json", "--out", str(folder))
    assert code == 0
    return document, time.monotonic() - begun


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    return probe(tmp_path_factory.mktemp("probe"))


def test_every_figure_is_there_within_a_minute(probed):
    from ftbench.worker.probe import KINDS

    document, seconds = probed
    assert seconds <= 62  # the probe itself, and Python's start
    for name, needed in KINDS.items():
        assert (document["products"][name] is not None) == (needed <= CAPABILITY), document["notes"]
    assert document["memory"]["copy_gbs"] > 100
    assert document["host_link"]["to_device_gbs"] > 1
    assert 1 < document["launch_us"] < 100
    assert 1 < document["capacity"]["total_gb"] <= document["capacity"]["driver_total_gb"]


@pytest.mark.exhaustive
def test_a_second_probe_finds_the_same(probed, tmp_path):
    first, second = probed[0], probe(tmp_path)[0]
    for name, product in first["products"].items():
        if product:
            assert second["products"][name]["best_tflops"] == pytest.approx(product["best_tflops"], rel=REPEATABLE), (
                name
            )
    assert second["memory"]["copy_gbs"] == pytest.approx(first["memory"]["copy_gbs"], rel=REPEATABLE)
    assert second["memory"]["triad_gbs"] == pytest.approx(first["memory"]["triad_gbs"], rel=REPEATABLE)


def test_doctor_says_that_a_plain_spec_can_run(tmp_path):
    spec = tmp_path / "spec.yaml"
    spec.write_text(
        "model: {id: Qwen/Qwen3-0.6B, weights: random}\ndataset: {name: synthetic, samples: 8, length: 64}\n"
    )
    code, document = command("doctor", str(spec), "--json", "--out", str(tmp_path))
    assert (code, document["can_run"]) == (0, True), [f for f in document["findings"] if f["verdict"] == "fail"]
    assert {finding["area"] for finding in document["findings"]} >= {"stack", "gpu", "methods", "host"}
