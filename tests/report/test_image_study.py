"""The image study in a report: published and measured changes, and the guide from the runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ftbench.facts import read_facts
from ftbench.report.build import Request, report
from ftbench.report.data.collect import collect
from ftbench.report.data.groups import cells_of, runs_of
from ftbench.report.sections import image_study
from made_runs import make_run, steps

FIXED = {"optimizations.fixed_shape": True, "optimizations.image_size": 336, "optimizations.compile": True}
STUDY = {
    "model.id": "llava-hf/llava-v1.6-mistral-7b-hf", "dataset.name": "images", "dataset.image_size": [500, 500],
    "dataset.length": None,
}  # fmt: skip


def ran(out: Path, name: str, step_s: float, first_s: float, peak: float, **spec: object):
    """Make a run of thirty steps of four images. The first step takes `first_s`."""
    rows = steps(30, step_s, first_s, noise=0.0, peak_memory_gb=peak, images=4, tiles=20, image_tokens=8000,
                 text_tokens=192, image_patches=11540)  # fmt: skip
    return make_run(out, name, rows, spec={**STUDY, **spec})


@pytest.fixture
def study(tmp_path):
    """Plain LoRA, the same compiled in a fixed shape, and QLoRA."""
    ran(tmp_path, "plain", 1.0, 2.0, 60.0)
    ran(tmp_path, "fixed", 0.5, 51.5, 40.0, **FIXED)
    ran(tmp_path, "qlora", 1.2, 2.2, 20.0, method={"name": "qlora"})
    return tmp_path


def cells(folder: Path):
    return cells_of(runs_of(collect([folder])))


def row_of(folder: Path, name: str):
    section = image_study.study(cells(folder))
    (record,) = [record for record in section.records if record["combination"] == name]
    return record


def test_published_and_measured_changes_are_listed(study):
    fixed = row_of(study, "fixed shape and compile")
    assert (fixed["step time, published"], fixed["step time, here"]) == ("-53 to -47 %", "-50 %")
    assert (fixed["memory, published"], fixed["memory, here"]) == ("-29 to -4 %", "-33 %")
    assert fixed["batches here"] == "4"
    assert row_of(study, "qlora")["step time, here"] == "+20 %"
    assert row_of(study, "bf16")["step time, here"] == row_of(study, "fp8")["step time, here"] == ""


def test_other_combinations_come_last_and_missing_ones_are_listed(study):
    ran(study, "own", 0.8, 3.0, 50.0, **{"optimizations.packing": True, "optimizations.image_cache": True})
    ran(study, "photos", 0.1, 1.0, 10.0, **{"dataset.image_sizes": "photographs", "optimizations.compile": True})
    section = image_study.study(cells(study))
    assert [record["combination"] for record in section.records][-1].startswith("lora with")
    assert section.records[-1]["step time, here"] == "-20 %"
    assert len(section.records) == len(read_facts("image_study.yaml")["combinations"]) + 1, "no photographs ran plain"
    assert "Not run here: fp8; compile; compile and fp8; " in section.paragraphs[-1]
    assert "configs/llava-next.yaml" in section.paragraphs[-1]


def test_narrow_guide_shows_the_recommendation(study, ftbench, monkeypatch):
    """Shared values are in the title."""
    monkeypatch.setenv("COLUMNS", "60")
    out = ftbench("report", study)[1]
    title, heading = re.search(r"FROM HOW MANY STEPS ON\n(.*?)\n([^\n]*GiB of memory.*?)\n", out, re.DOTALL).groups()
    assert title.startswith("model ")
    assert "take" in heading
    assert "model" not in heading


def test_loading_options_do_not_make_another_combination(tmp_path):
    ran(tmp_path, "plain", 1.0, 2.0, 60.0, **{"optimizations.loader_processes": 8})
    assert row_of(tmp_path, "bf16")["batches here"] == "4"


def test_image_sizes_are_different_workloads(study):
    def steps_of_fixed() -> list[tuple[str, str, str]]:
        names = ("GiB of memory", "from steps on", "peak GiB")
        return [tuple(record[name] for name in names) for record in image_study.guide(cells(study)).records]

    before = steps_of_fixed()
    ran(study, "photos", 0.1, 1.0, 10.0, **{"dataset.image_sizes": "photographs"})
    assert steps_of_fixed()[: len(before)] == before, "photographs are slower"


def test_slow_start_pays_off_after_cost_over_gain(study):
    """The start costs 51 s instead of 1 s, and each step gains half a second."""
    fixed = row_of(study, "fixed shape and compile")
    assert fixed["pays after steps, published"] == "220"
    assert int(fixed["pays after steps, here"]) == pytest.approx((51 - 1) / 0.5, abs=1)


def test_guide_picks_the_first_to_finish_that_fits(study):
    found = [(r["GiB of memory"], r["from images on"], r["take"]) for r in image_study.guide(cells(study)).records]
    small = [take for memory, _, take in found if memory == "24 or more"]
    large = [(images, take) for memory, images, take in found if memory == "80 or more"]
    assert len(small) == 1
    assert small[0].startswith("qlora")
    assert [("compile" in take) for _, take in large] == [False, True]
    assert (large[0][0], int(large[1][0])) == ("0", pytest.approx(4 * 100, abs=4))
    assert not any(memory.startswith("16") for memory, _, _ in found)


def test_section_is_shown_only_for_image_runs(study, tmp_path_factory):
    for form in "table", "md", "html":
        text = report(Request([study], format=form)).text
        assert "published and measured here" in text.lower() or "PUBLISHED AND MEASURED HERE" in text
        assert "which combination, from how many steps on" in text.lower()
    other = tmp_path_factory.mktemp("text")
    make_run(other, "text")
    assert "combination" not in report(Request([other], format="md")).text


def test_study_combinations_match_the_configs():
    from ftbench.spec.load import load
    from ftbench.spec.optimizations import switched_on

    configs = Path(__file__).parents[2] / "configs"
    specs = [load(path) for path in configs.glob("llava-next-*.yaml")]
    shipped = sorted((spec.method.name, sorted(switched_on(spec.optimizations))) for spec in specs)
    told = sorted((each["method"], sorted(each["with"])) for each in read_facts("image_study.yaml")["combinations"])
    assert shipped == told
    assert re.search(r"\(2026-02-20\)", read_facts("image_study.yaml")["source"])


def test_run_table_has_images_per_second(study, tmp_path_factory):
    lines = report(Request([study], sort="images/s")).text.splitlines()
    assert "images/s" in lines[1]
    assert "fixed shape" in lines[2], "the fastest comes first"
    other = tmp_path_factory.mktemp("text")
    make_run(other, "text")
    assert "images/s" not in report(Request([other])).text
