"""The study of images in a report: published figures beside runs that are like it, and a guide that runs alone give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ftbench.facts import read_facts
from ftbench.report.command import Request, report
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
    """Thirty steps of four pictures, the first of which takes `first_s`."""
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


def test_published_changes_stand_beside_those_of_the_runs(study):
    fixed = row_of(study, "fixed shape and compile")
    assert (fixed["step time, published"], fixed["step time, here"]) == ("-53 to -47 %", "-50 %")
    assert (fixed["memory, published"], fixed["memory, here"]) == ("-29 to -4 %", "-33 %")
    assert fixed["batches here"] == "4"
    assert row_of(study, "qlora")["step time, here"] == "+20 %"
    assert row_of(study, "bf16")["step time, here"] == row_of(study, "fp8")["step time, here"] == ""


def test_other_ways_stand_behind_the_study_s_and_what_has_no_run_is_said(study):
    ran(study, "own", 0.8, 3.0, 50.0, **{"optimizations.packing": True, "optimizations.image_cache": True})
    ran(study, "photos", 0.1, 1.0, 10.0, **{"dataset.image_sizes": "photographs", "optimizations.compile": True})
    section = image_study.study(cells(study))
    assert [record["combination"] for record in section.records][-1].startswith("lora with")
    assert section.records[-1]["step time, here"] == "-20 %"
    assert len(section.records) == len(read_facts("image_study.yaml")["combinations"]) + 1, "no photographs ran plain"
    assert "Not run here: fp8; compile; compile and fp8; " in section.paragraphs[-1]
    assert "configs/llava-next.yaml" in section.paragraphs[-1]


def test_a_narrow_guide_has_room_for_what_to_take(study, ftbench, monkeypatch):
    """What all rows share stands in the title."""
    monkeypatch.setenv("COLUMNS", "60")
    out = ftbench("report", study)[1]
    title, heading = re.search(r"FROM HOW MANY STEPS ON\n(.*?)\n([^\n]*GiB of memory.*?)\n", out, re.DOTALL).groups()
    assert title.startswith("model ")
    assert "take" in heading
    assert "model" not in heading


def test_how_images_come_to_a_step_makes_no_other_combination(tmp_path):
    ran(tmp_path, "plain", 1.0, 2.0, 60.0, **{"optimizations.loader_processes": 8})
    assert row_of(tmp_path, "bf16")["batches here"] == "4"


def test_pictures_of_other_sizes_are_another_workload(study):
    def steps_of_fixed() -> list[tuple[str, str, str]]:
        names = ("GiB of memory", "from steps on", "peak GiB")
        return [tuple(record[name] for name in names) for record in image_study.guide(cells(study)).records]

    before = steps_of_fixed()
    ran(study, "photos", 0.1, 1.0, 10.0, **{"dataset.image_sizes": "photographs"})
    assert steps_of_fixed()[: len(before)] == before, "photographs are ahead of none of these"


def test_a_slow_start_pays_after_what_it_costs_over_what_a_step_gains(study):
    """It begins 51 s of steps late against 1 s, and gains half a second a step."""
    fixed = row_of(study, "fixed shape and compile")
    assert fixed["pays after steps, published"] == "220"
    assert int(fixed["pays after steps, here"]) == pytest.approx((51 - 1) / 0.5, abs=1)


def test_the_guide_takes_what_has_trained_first_on_the_memory_that_there_is(study):
    found = [(r["GiB of memory"], r["from images on"], r["take"]) for r in image_study.guide(cells(study)).records]
    small = [take for memory, _, take in found if memory == "24 or more"]
    large = [(images, take) for memory, images, take in found if memory == "80 or more"]
    assert len(small) == 1
    assert small[0].startswith("qlora")
    assert [("compile" in take) for _, take in large] == [False, True]
    assert (large[0][0], int(large[1][0])) == ("0", pytest.approx(4 * 100, abs=4))
    assert not any(memory.startswith("16") for memory, _, _ in found)


def test_it_stands_in_every_report_of_runs_with_images_and_in_no_other(study, tmp_path_factory):
    for form in "table", "md", "html":
        text = report(Request([study], format=form)).text
        assert "published and measured here" in text.lower() or "PUBLISHED AND MEASURED HERE" in text
        assert "which combination, from how many steps on" in text.lower()
    other = tmp_path_factory.mktemp("text")
    make_run(other, "text")
    assert "combination" not in report(Request([other], format="md")).text


def test_every_combination_of_the_study_is_one_of_its_configs():
    from ftbench.spec.load import load
    from ftbench.spec.optimizations import switched_on

    configs = Path(__file__).parents[2] / "configs"
    specs = [load(path) for path in configs.glob("llava-next-*.yaml")]
    shipped = sorted((spec.method.name, sorted(switched_on(spec.optimizations))) for spec in specs)
    told = sorted((each["method"], sorted(each["with"])) for each in read_facts("image_study.yaml")["combinations"])
    assert shipped == told
    assert re.search(r"\(2026-02-20\)", read_facts("image_study.yaml")["source"])


def test_the_table_of_runs_has_images_a_second_where_there_are_some(study, tmp_path_factory):
    lines = report(Request([study], sort="images/s")).text.splitlines()
    assert "images/s" in lines[1]
    assert "fixed shape" in lines[2], "the fastest comes first"
    other = tmp_path_factory.mktemp("text")
    make_run(other, "text")
    assert "images/s" not in report(Request([other])).text
