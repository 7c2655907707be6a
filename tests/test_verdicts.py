"""The verdicts of results/*/parity have the limits of the current check."""

import json
from pathlib import Path

import pytest

from ftbench.spec.experiment import Experiment
from ftbench.sweep import verdict

ROOT = Path(__file__).parents[1]
EARLIER = ROOT / "results/h200/parity/judged/fastest-full-fp8"  # judged before limits included the rounding of clipping
FOLDERS = sorted(path.parent for path in ROOT.glob("results/*/parity/*/*/parity.json"))


def records(folder: Path) -> list[tuple[Experiment, dict]]:
    """Return the runs of a folder that recorded gradients, without the controls."""
    found = []
    for path in sorted(folder.glob("*/agreement.json")):
        known = json.loads(path.with_name("spec.json").read_text())
        spec = Experiment.model_validate({key: value for key, value in known.items() if key in Experiment.model_fields})
        if spec.measure.control == "off":
            found.append((spec, json.loads(path.read_text())))
    return found


def is_plain(spec: Experiment) -> bool:
    on = spec.optimizations
    return spec.method.name != "unsloth" and not (on.chunked_loss or on.compile or on.weight_offload)


def yardsticks(judged: Experiment, runs: list[tuple[Experiment, dict]]) -> list[dict]:
    """Return the plain runs in the precision of a judged run, which set its limits."""
    fp8 = judged.optimizations.fp8 != "off"
    return [record for spec, record in runs if is_plain(spec) and spec.train.precision == judged.train.precision
            and spec.measure.round_products == fp8 and spec.method.quantised == judged.method.quantised]  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: "-".join(path.parts[-4:]))
def test_committed_verdicts_follow_from_the_recorded_errors(folder):
    runs = records(folder)
    judged = [(spec, record) for spec, record in runs if not is_plain(spec)]
    found = [verdict.gradient(record, yardsticks(spec, runs), spec) for spec, record in judged]
    if folder == EARLIER:
        assert [each.state for each in found] == ["pass"]
        return
    for recipe in json.loads((folder / "parity.json").read_text())["recipes"]:
        level = recipe["levels"]["gradient"]
        wanted = (level["state"], pytest.approx(level["number"]), pytest.approx(level["limit"]))
        assert wanted in [(each.state, each.number, each.limit) for each in found], recipe["name"]


@pytest.mark.parametrize(("factor", "state"), [(0.0, "pass"), (0.02, "fail"), (-0.03, "fail")])
def test_another_clipping_factor_fails_beyond_its_rounding(factor, state):
    """Clipping multiplies all second moments by one factor. Change it in a run of a recipe with 16-bit gradients."""
    runs = records(EARLIER)
    spec, record = next((spec, record) for spec, record in runs if not is_plain(spec))
    for row in record["tensors"]:
        row[4] += factor * (row[1] == "moment")
    assert verdict.gradient(record, yardsticks(spec, runs), spec).state == state
