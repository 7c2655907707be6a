"""The bottleneck of a run on a GPU, from the driver's counters, compared with the profiler. About two minutes, most
of it Qwen3-8B with compiled layers (trained by peft it is memory-bound on an H200): `pytest gpu/test_waits.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from methods import ON_GPU

from ftbench.launch import runner, trl
from ftbench.store.rundir import WAITING

torch = pytest.importorskip("torch", reason="training libraries are not installed")
pytestmark = [*ON_GPU, pytest.mark.timeout(300)]
SPECS = {
    "launch-bound": """
model: {id: Qwen/Qwen3-0.6B, weights: random}
dataset: {name: synthetic, samples: 60, length: 64, max_length: 64}
train: {batch_size: 1}
""",
    "compute-bound": """
model: {id: Qwen/Qwen3-8B, weights: random}
dataset: {name: synthetic, samples: 52, length: 2048, max_length: 2048}
train: {batch_size: 4}
optimizations: {compile: on, chunked_loss: on}
""",
}
# The worker as `ftbench run` starts it, with a collator that takes its time.
SLOW_WORKER = """
import sys, time
from ftbench.worker.data.collate import Collator
collate = Collator.__call__
def slow(self, rows):
    time.sleep(0.2)
    return collate(self, rows)
Collator.__call__ = slow
from ftbench.worker.__main__ import main
sys.exit(main(sys.argv[1]))
"""


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """Return the output of `ftbench run` or `ftbench profile` for a spec. Both start at once, and one waits."""

    def output(command: str, name: str) -> dict:
        folder = tmp_path_factory.mktemp(name)
        (folder / "spec.yaml").write_text(SPECS[name])
        ended = subprocess.run(
            [sys.executable, "-m", "ftbench", command, str(folder / "spec.yaml"), "--json", "--out", str(folder)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout
        return json.loads(ended.stdout)

    with ThreadPoolExecutor(2) as pool:
        begun = {}

        def once(command: str, name: str) -> dict:
            if name not in begun:
                begun[name] = {each: pool.submit(output, each, name) for each in ("run", "profile")}
            return begun[name][command].result()

        yield once


@pytest.mark.parametrize("name", ["launch-bound", pytest.param("compute-bound", marks=pytest.mark.exhaustive)])
def test_the_cheap_share_is_the_profilers(measured, name):
    bound = measured("run", name)["summary"]["bound"]
    profiled = measured("profile", name)["profile"]["busy_share_unprofiled"]
    assert bound["gpu_busy_method"] in ("GPM counters", "NVML utilisation")
    assert bound["gpu_busy"] == pytest.approx(profiled, abs=0.05)


@pytest.mark.parametrize("name", ["launch-bound", pytest.param("compute-bound", marks=pytest.mark.exhaustive)])
def test_the_verdict_is_right(measured, name):
    bound = measured("run", name)["summary"]["bound"]
    assert bound["verdict"] == name, bound


def test_a_slowed_loader_is_what_the_run_waits_for(tmp_path, monkeypatch):
    worker = [sys.executable, "-P", "-c", SLOW_WORKER]
    monkeypatch.setattr(trl, "command", lambda spec, run: [*worker, str(run.path.resolve())])
    (tmp_path / "spec.yaml").write_text(SPECS["launch-bound"])
    bound = runner.run(tmp_path / "spec.yaml", ["dataset.samples=30"], tmp_path).summary.bound
    assert bound["verdict"] == "data-bound", bound
    assert bound["data_wait"] > 0.3


def test_every_figure_behind_the_verdict_is_told(measured):
    document = measured("run", "launch-bound")
    assert {"data_wait", "power_capped", "sm_clock_mhz", "products"} <= {
        name for name, value in document["summary"]["bound"].items() if value is not None
    }
    header = Path(document["run_dir"], "steps.csv").read_text().splitlines()[0]
    assert {"gpu_busy", "tensor_busy", "memory_busy", "allocations"} <= set(header.split(","))


def test_kernels_of_another_process_are_recorded_and_the_run_is_contended(tmp_path, measured):
    """The other process multiplies matrices all the time; without it the same run is not contended."""
    (tmp_path / "spec.yaml").write_text(SPECS["launch-bound"])
    alone = measured("run", "launch-bound")["summary"]["contention"]
    program = "import torch; a = torch.ones(4096, 4096, device='cuda')\nprint('ready', flush=True)\nwhile True: a @ a"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        beside = runner.run(tmp_path / "spec.yaml", [], tmp_path / "beside").summary
        other.kill()
    if alone.get("gpu_by_others") is None:
        pytest.skip("this driver does not report which process uses the GPU")
    assert alone["gpu_by_others"] < 0.05
    assert beside.contention["contended"]
    assert beside.contention["gpu_by_others"] > 0.05
    assert any("the GPU was not free before the run" in warning for warning in beside.warnings)


def test_a_run_after_another_begins_on_a_free_gpu(measured):
    """Both started at once. The second waited until the memory of the first was free, and does not warn."""
    summaries = [measured(command, "launch-bound")["summary"] for command in ("run", "profile")]
    assert any(summary["phases_s"].get(WAITING, 0.0) > 1 for summary in summaries)
    for summary in summaries:
        assert not [warning for warning in summary["warnings"] if "was not free" in warning]
