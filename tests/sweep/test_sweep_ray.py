"""What of `ftbench sweep --on ray` is Ray's alone; the rest is in test_sweep_clusters.py."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ftbench[ray]'")

from sweeps import sweep, write_sweep


@pytest.mark.parametrize(
    ("on", "said"),
    [
        ("ray://127.0.0.1:1", "nobody answers at 127.0.0.1:1"),
        ("ray://nowhere", "nobody answers at nowhere (no port is named)"),
        ("ray://me:word@127.0.0.1:1", "nobody answers at 127.0.0.1:1"),
        ("pbs", "allowed"),
    ],
)
def test_a_cluster_that_is_not_there_is_a_sentence(tmp_path, on, said):
    done = sweep(write_sweep(tmp_path, {"train.batch_size": [1, 2]}), tmp_path / "out", "--on", on)
    assert done.code == (2 if on == "pbs" else 3)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
