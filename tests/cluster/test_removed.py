"""The core works if the package `ftbench.cluster` is removed."""

import sys

from sweeps import write_sweep


def test_run_sweep_and_report_work_without_the_package(ftbench, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("ftbench.cluster")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ftbench.cluster", None)  # an import raises ImportError
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    spec, out = write_sweep(tmp_path, {"train.batch_size": [1, 2]}), tmp_path / "out"
    assert ftbench("run", spec, "--out", out)[0] == 0
    assert ftbench("sweep", spec, "--out", out)[0] == 0
    assert ftbench("report", out)[0] == 0
