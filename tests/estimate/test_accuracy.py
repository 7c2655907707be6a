"""Compare the memory estimate with the committed runs."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean, median

import pytest

from ftbench.estimate.memory.estimate import FITTED, MEASURED, constants
from ftbench.estimate.workload.model import shape_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import memory_estimates as study

# Bounds of mean and worst relative error on the committed runs. Reserved memory is worst for small models, where
# half a GiB is a fifth, and of batches with many lengths, where it depends on their order.
BOUNDS = {"allocated": (0.01, 0.065), "reserved": (0.05, 0.22), "device": (0.05, 0.18)}


@pytest.fixture(scope="module")
def runs() -> list[study.Measured]:
    return study.once(study.read(study.RUNS))


@pytest.mark.parametrize("part", ["fitted", "held out"])
def test_the_shipped_estimator_stays_within_its_bounds(runs: list[study.Measured], part: str) -> None:
    found = [run for run in runs if study.held_out(run) == (part == "held out")]
    rows = study.rows(found, constants())
    assert len(rows) >= 40
    for tier, (mean, worst) in BOUNDS.items():
        error = study.error(rows, tier)
        assert error is not None
        assert error.mean <= mean, f"{tier}: {error}"
        assert error.worst <= worst, f"{tier}: {error}"
        # too little is a false fit; the pool of Qwen3-14B under fsdp, batch 4 per GPU, is 15.6 % larger than estimated
        for several, least in ((False, -0.14), (True, -0.16)):
            found = [
                row.errors[tier] for row in rows if (row.run.spec.launch.gpus > 1) == several and tier in row.errors
            ]
            assert min(found, default=0.0) >= least, tier


def test_kernels_offloading_and_sharding_stay_within_their_bounds(runs: list[study.Measured]) -> None:
    """3 % on one GPU, 5 % of a rank."""
    rows = study.rows(runs, constants())
    ways = {
        "our kernels": (0.03, [row for row in rows if row.run.spec.optimizations.triton_kernels]),
        "weights on the host": (0.03, [row for row in rows if row.run.spec.optimizations.weight_offload]),
        "several GPUs": (0.05, [row for row in rows if row.run.spec.launch.gpus > 1]),
    }
    for way, (bar, found) in ways.items():
        assert len(found) >= 2, way
        missed = {row.run.name: row.errors["allocated"] for row in found if abs(row.errors["allocated"]) > bar}
        assert missed == {}, way


@pytest.mark.parametrize(("card", "least"), [("h100", 44), ("h200", 34)])
def test_the_text_study_stays_within_its_bounds(card: str, least: int) -> None:
    """Median and worst error as promised for predictions. The constants were fitted to other runs."""
    rows = study.rows(study.read([Path(f"results/{card}/founding-text")]), constants())
    assert len(rows) >= least
    errors = {tier: [abs(row.errors[tier]) for row in rows] for tier in ("allocated", "reserved")}
    assert median(errors["reserved"]) <= 0.03
    assert max(errors["reserved"]) <= 0.08
    assert max(errors["allocated"]) <= 0.065


def test_the_image_study_stays_within_its_bounds() -> None:
    """Nothing was fitted to these runs. With texts of one length (`fixed`), the allocator's pool is small."""
    rows = study.rows(study.read([Path("results/h100/founding-images")]), constants())
    errors = {row.run.name: abs(row.errors["reserved"]) for row in rows}
    fixed = [errors[row.run.name] for row in rows if row.run.spec.optimizations.fixed_shape]
    assert len(rows) >= 60
    assert len(fixed) >= 18
    assert median(errors.values()) <= 0.03
    assert max(errors.values()) <= 0.1  # without the reuse of the blocks of the loss: 10.7 %
    assert max(fixed) <= 0.08


def test_the_page_on_estimates_states_the_mean_errors(runs: list[study.Measured]) -> None:
    found: tuple[list[float], list[float]] = [], []
    for row in study.rows(runs, constants()):
        found[study.held_out(row.run)].append(100 * abs(row.errors["allocated"]))
    fitted, held = (fmean(errors) for errors in found)
    text = " ".join(Path("docs/explanation/estimates.md").read_text("utf-8").split())
    assert f"{fitted:.1f} % in the fitted experiments and {held:.1f} % in the other experiments" in text


def test_the_guide_on_images_states_the_errors_of_the_image_study() -> None:
    rows = study.rows(study.read([*Path("results").glob("h?00/founding-images")]), constants())
    errors = [100 * abs(row.errors["allocated"]) for row in rows]
    text = " ".join(Path("docs/how-to/images.md").read_text("utf-8").split())
    assert f"differs from the estimates by {median(errors):.1f} % (median), and by at most {max(errors):.1f} %" in text


def test_other_frameworks_and_shared_gpus_are_excluded(runs: list[study.Measured]) -> None:
    assert {run.spec.launch.framework for run in runs} == {"trl"}
    assert not any(run.spec.measure.share_gpu for run in runs)


def test_runs_of_the_same_step_share_the_hold_out(runs: list[study.Measured]) -> None:
    for run in runs:
        data = run.spec.dataset.model_copy(update={"samples": 7, "seed": 1})
        train = run.spec.train.model_copy(update={"max_steps": 3, "learning_rate": 1.0})
        twin = run.spec.model_copy(update={"dataset": data, "train": train})
        assert study.is_held_out(twin, run.gpu) == study.is_held_out(run.spec, run.gpu)
    other = [
        run.spec.model_copy(update={"train": run.spec.train.model_copy(update={"batch_size": 61})}) for run in runs
    ]
    assert {study.is_held_out(spec, "NVIDIA H200") for spec in other} == {True, False}


def test_runs_out_of_memory_are_not_estimated_to_fit(runs: list[study.Measured]) -> None:
    assert sum(not run.fits for run in runs) >= 5
    assert study.false_fits(runs, constants()) == []


def test_runs_that_fitted_are_not_estimated_not_to_fit(runs: list[study.Measured]) -> None:
    assert [run.name for run in runs if run.fits and run.estimate(constants()).verdict == "does not fit"] == []


@pytest.mark.parametrize("tier", study.TIERS)
def test_nine_tenths_of_the_held_out_peaks_are_within_the_range(runs: list[study.Measured], tier: str) -> None:
    held = [run for run in runs if study.held_out(run)]
    found = [study.is_inside(row, tier) for row in study.rows(held, constants()) if tier in row.errors]
    assert len(found) >= 60
    assert 0.85 <= sum(found) / len(found) <= 0.97


def test_the_shipped_constants_are_those_of_the_fitted_runs(runs: list[study.Measured]) -> None:
    """`scripts/memory_estimates.py --fit` made facts/estimator.yaml, and from no held-out run."""
    again = study.fit([run for run in runs if not study.held_out(run)])
    shipped = constants()
    assert again.runs == shipped.runs
    for name in FITTED:
        assert getattr(shipped, name) == pytest.approx(getattr(again, name), rel=1e-3), name


def test_the_page_is_up_to_date(runs: list[study.Measured], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = study.PAGE.read_text("utf-8")
    monkeypatch.setattr(study, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(study, "read", lambda _: runs)
    monkeypatch.setattr(sys, "argv", ["memory_estimates.py"])
    study.main()
    assert study.PAGE.read_text("utf-8") == committed


def test_families_with_a_narrow_range_were_measured(runs: list[study.Measured]) -> None:
    shapes = [shape_of(run.spec.model) for run in runs if run.fits]
    assert {(shape.vision or shape).family for shape in shapes} == MEASURED


def test_runs_with_images_are_within_two_percent(runs: list[study.Measured]) -> None:
    """Packed rows with one or several images in 16 and 8 bits, and plain batches; all are held out of the fit. The
    estimate does not know that the last layer now computes only label tokens, so it is too high for the newest runs."""
    rows = study.rows([run for run in runs if run.spec.dataset.has_images], constants())
    assert len(rows) >= 5
    assert all(study.held_out(row.run) for row in rows)
    errors = {row.run.name: row.errors["allocated"] for row in rows}
    newest = [errors.pop(name) for name in [*errors] if any(hash in name for hash in ("21a80d64027e", "848d7f9b3b7f"))]
    assert len(newest) == 2
    assert max(map(abs, newest)) < 0.02
    assert max(map(abs, errors.values())) < 0.01
    text = " ".join(Path("docs/explanation/estimates.md").read_text("utf-8").split())
    assert all(f"{100 * error:.1f} % too high" in text for error in newest)
