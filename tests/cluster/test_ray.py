"""`sweep --on ray`: connection errors. test_clusters.py has the rest."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ftbench[ray]'")


from sweeps import write_sweep


@pytest.mark.parametrize(
    ("on", "message"),
    [
        ("ray://127.0.0.1:1", "no answer at 127.0.0.1:1"),
        ("ray://nowhere", "no answer at nowhere (the port is missing)"),
        ("ray://me:word@127.0.0.1:1", "no answer at 127.0.0.1:1"),
        ("pbs", "allowed"),
    ],
)
def test_unreachable_cluster_is_reported(ftbench, tmp_path, on, message):
    spec = write_sweep(tmp_path, {"train.batch_size": [1, 2]})
    code, _, err = ftbench("sweep", spec, "--out", tmp_path / "out", "--on", on)
    assert code == (2 if on == "pbs" else 3)
    assert message in err
