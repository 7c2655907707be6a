"""The model of the parity study is trained from what lies on the machine, and its rows are of one length."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="training libraries are not installed")

import warm
from ftbench.spec.experiment import resolve
from ftbench.spec.load import load
from ftbench.worker import train
from ftbench.worker.model import loading


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_learned_model_loads_its_rows_are_equally_long_and_it_has_learned_something(tmp_path):
    size = ("--size", "tiny", "--steps", "40", "--megabytes", "0.3", "--rows", "30")
    warm.script("learn-model", tmp_path / "learned", *size)
    facts = json.loads((tmp_path / "learned" / "learned.json").read_text())
    assert facts["held_out_loss"] < 0.98 * facts["first_loss"]
    spec = resolve(load(tmp_path / "learned" / "spec.yaml", ["dataset.eval_samples=4"]), None)
    tokenizer, data = train.prepared(spec, loading.source_of(spec.model, spec.method))
    rows = [sample for row in (*data.train, *data.evaluation) for sample in row]
    assert len(rows) == facts["rows"] == 30
    assert {len(sample.ids) for sample in rows} == {256}
    assert {sample.ids[-1] for sample in rows} == {tokenizer.eos_token_id}
