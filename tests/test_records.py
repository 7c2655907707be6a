"""`scripts/studies/records`: valid rows, rounds, one card and commit per sitting, left-out runs, the table."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from statistics import geometric_mean

import pytest

from ftbench.profile.work import group_of_kernel
from ftbench.report.build import Request, report
from ftbench.spec.experiment import resolve
from ftbench.spec.load import load
from ftbench.store.rundir import read_json, write_json
from made_runs import OOM, make_run, steps

ROOT = Path(__file__).parents[1]
RECORDS = runpy.run_path(str(ROOT / "scripts/studies/records"))
ROWS = {cell.name: cell for cell in RECORDS["CELLS"]}


@pytest.fixture
def card(monkeypatch):
    """A card and a commit that a test may change, and a host of constant speed."""
    found = {"uuid": "GPU-1111-2", "name": "NVIDIA H200", "temperature_c": 40, "commit": "a" * 40}
    machine = RECORDS["machine"]
    monkeypatch.setattr(machine, "gpu", lambda *_: found)
    monkeypatch.setattr(machine, "commit", lambda: found["commit"])
    monkeypatch.setitem(RECORDS["Sitting"].check.__globals__, "host_ms", lambda: 5.0)
    return found


def test_every_row_is_a_valid_spec_and_ends_within_one_call():
    for cell in ROWS.values():
        spec = resolve(load(ROOT / f"configs/{cell.config}.yaml", [*cell.sets, f"name={cell.name}"]), (9, 0))
        assert spec.model.weights == "random"
        assert cell.train_s + cell.weights_s < 540
    names = {*RECORDS["PEERS"], *RECORDS["PEERS"].values(), *RECORDS["LABELS"], *RECORDS["BEST"]}
    assert names <= set(ROWS)
    assert {*RECORDS["README"]} <= {cell.name for cell in RECORDS["HEADLINE"]}


def test_rounds_alternate_and_a_contended_run_is_left_out_with_its_reason(tmp_path, card, monkeypatch):
    """The first run of the second row is contended, so the next call makes up for it."""
    called = []

    def pretend(command, **_):
        name = next(re.search(r"name=(.*)", text)[1] for text in command if "=name=" in text)
        others = 0.9 if called.count(name) == 0 and name == "unsloth" else 0.0
        called.append(name)
        state = {"state": "ok", "started_at": "2026-01-01T00:00:00Z", "ended_at": "2026-01-01T00:01:00Z"}
        run = make_run(tmp_path, f"{name}-{called.count(name)}", steps(host_cpu_by_others=others), state=state)
        shutil.copytree(run.path, sitting.out / name / run.run_id)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pretend)
    sitting, rows = RECORDS["Sitting"](tmp_path / "sitting", 9, False), [ROWS["fastest"], ROWS["unsloth"]]
    assert sitting.run(rows, 2) == 1
    assert {*called[:2]} == {*called[2:]} == {"fastest", "unsloth"}
    (left,) = read_json(sitting.out / "sitting.json")["left_out"]
    assert left["reason"].startswith("contended")
    assert (sitting.out / ".left-out" / left["run"] / "steps.csv").is_file()
    again = RECORDS["Sitting"](sitting.out, 9, False)
    assert again.run(rows, 2) == 0
    assert called[4:] == ["unsloth"]
    slow = again.ended(ROWS["fastest"])[0]
    again.known["checks"].insert(0, {"at": "2026-01-01T00:01:30Z", "host_ms": 7.0})
    assert again.unfit(slow) == "", "it was not launch-bound"
    summary = read_json(slow.summary)
    write_json(slow.summary, summary | {"bound": summary["bound"] | {"verdict": "launch-bound"}})
    assert again.unfit(slow) == "the host was 40 % slower than in the rest of the sitting"
    sitting = RECORDS["Sitting"](tmp_path / "short", 1, False)
    sitting.jobs = 1
    assert sitting.run(rows, 2) == 2
    assert called[5:] == ["fastest"], "no second round before the first is complete"


def test_the_rounds_of_a_large_model_end_before_the_weights_of_the_next_are_made(tmp_path, card, monkeypatch):
    called: list[str] = []
    monkeypatch.setattr(RECORDS["Sitting"], "_run", lambda _, cell, *__: called.append(cell.name))
    sitting = RECORDS["Sitting"](tmp_path, 60, False)
    sitting.jobs = 1
    rows = ["fastest", "llama-fastest", "moe-fastest", "moe-experts", "oss-fastest"]
    sitting.run([ROWS[name] for name in rows], 2)
    assert called == [*rows[:2] * 2, *rows[2:4] * 2, *rows[4:] * 2]


def test_a_row_that_ran_out_of_memory_is_not_repeated_in_the_next_round(tmp_path, card, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it was repeated"))
    sitting = RECORDS["Sitting"](tmp_path / "s", 9, False)
    run = make_run(tmp_path, "oom", steps(), state=OOM)
    shutil.copytree(run.path, sitting.out / "moe-fastest" / run.run_id)
    sitting.run([ROWS["moe-fastest"]], 3)


def test_a_sitting_goes_on_with_the_same_card_and_commit_only(tmp_path, card, monkeypatch):
    folder_of, results = RECORDS["folder_of"], tmp_path / "results"
    first = folder_of(tmp_path / "out", results)
    RECORDS["Sitting"](first, 9, False)
    assert folder_of(tmp_path / "out", results) == first
    shutil.move(first, results / first.name)
    assert folder_of(tmp_path / "out", results) == first, "committed sittings go on, too"
    assert (first / "sitting.json").is_file()
    for key, value in (("uuid", "GPU-3333-4"), ("commit", "b" * 40)):
        before, card[key] = card[key], value
        assert folder_of(tmp_path / "out", results) != first
        card[key] = before
    monkeypatch.setattr(RECORDS["rundir"], "now", lambda: "2027-01-01T00:00:00Z")
    monkeypatch.setattr(RECORDS["time"], "time", lambda: 1798761600.0)
    assert folder_of(tmp_path / "out", results) != first, "too long ago"


def test_the_table_names_both_sides_and_says_likely_below_three_rounds(tmp_path, card):
    sitting = RECORDS["Sitting"](tmp_path / "s", 9, False)
    for name, seconds in {"fastest": 0.5, "unsloth": 1.0, "unsloth-padded": 0.8}.items():
        for number in range(2 if name == "fastest" else 3):
            change = {"optimizations.compile": name == "fastest", "train.seed": 1 + (name == "unsloth")}
            run = make_run(tmp_path, f"{name}-r{number}", steps(seconds=seconds, seed=number), spec=change)
            shutil.copytree(run.path, sitting.out / name / run.run_id)
    rows = dict(RECORDS["lines"](sitting.out))
    assert rows["fastest"][1] == "2, likely"
    peer = r"unsloth at its best \(16-bit, .*, padded\)"
    assert re.fullmatch(rf"likely 1\.60 \(1\.\d\d to 1\.\d\d\) x {peer}", rows["fastest"][3])
    assert rows["unsloth"][1] == "3"
    assert re.match(r"0\.80 \(", rows["unsloth"][3])
    assert "One card (NVIDIA H200, GPU-1111-2), one commit (aaaaaaaa)" in RECORDS["published"](sitting.out)
    assert RECORDS["latest"](tmp_path) is None, "rows of the headline are missing"
    text = " ".join(report(Request((sitting.out,))).text.split())
    assert "two to three rounds, one card, one commit." in text
    assert len(re.findall(r"at batch 4", text.partition("# recipe")[2].partition("Median")[0])) == 3, "a row per recipe"
    run = make_run(tmp_path, "oom", steps(), state=OOM)
    shutil.copytree(run.path, sitting.out / "full-65k" / run.run_id)
    assert "smallest (no valid run), full-65k (out of memory)." in RECORDS["published"](sitting.out)


def test_a_run_that_is_left_out_later_leaves_the_published_folder_too(tmp_path, card, monkeypatch, capsys):
    main = RECORDS["main"]
    monkeypatch.setitem(main.__globals__, "ROOT", tmp_path)
    monkeypatch.setattr(RECORDS["Sitting"], "run", lambda *_: 0)
    monkeypatch.setattr("sys.argv", ["records", str(tmp_path / "out"), "--only", "fastest"])
    main()
    (sitting,) = (tmp_path / "out").iterdir()
    shutil.copytree(make_run(tmp_path, "a").path, sitting / "fastest/a")
    main()
    (sitting / ".left-out/fastest").mkdir(parents=True)
    (sitting / "fastest/a").rename(sitting / ".left-out/fastest/a.1")
    main()
    published = tmp_path / "results/h200/records" / sitting.name
    assert (published / ".left-out/fastest/a.1/steps.csv").is_file()
    assert not (published / "fastest").exists()


def test_a_sitting_that_was_cut_after_a_round_does_not_replace_a_complete_one(tmp_path, card):
    for number, (name, rounds) in enumerate({"complete": 3, "cut": 1}.items()):
        sitting = RECORDS["Sitting"](tmp_path / name, 9, False)
        sitting.known["checks"][0]["at"] = f"2026-01-0{number + 1}T00:00:00Z"
        write_json(sitting.out / "sitting.json", sitting.known)
        for row in RECORDS["README"]:
            for each in range(rounds):
                (sitting.out / row / str(each)).mkdir(parents=True)
                write_json(sitting.out / row / str(each) / "state.json", {"state": "ok"})
    assert RECORDS["latest"](tmp_path) == tmp_path / "complete"
    shutil.rmtree(tmp_path / "complete")
    assert RECORDS["latest"](tmp_path) == tmp_path / "cut"


GROUPS = ("matmul", "attention", "norm/elementwise", "quantise/dequantise", "optimizer")
GOALS = {
    "fastest": 18_000, "fastest-fp8": 26_000, "fastest-full": 12_600, "full-fp8": 16_000, "fastest-qlora": 16_500,
    "oss-fastest": 29_000, "oss-experts": 26_000,
    "images-fastest": 6.0, "images-fastest-fp8": 8.5, "short-fastest": 17_500, "smallest": 9_000,
}  # fmt: skip


def profile_rows() -> list[str]:
    """Return the rows of docs/evidence/profiles.md: milliseconds of GPU work per step, by group of kernels."""
    results = ROOT / "results/h200"
    reached: dict[str, tuple[int, str]] = {}
    for folder in RECORDS["sittings"](results / "records"):
        for name, columns in RECORDS["lines"](folder):
            if (rounds := int(columns[1][0])) >= reached.get(name, (0, ""))[0]:
                reached[name] = rounds, "likely " * ("likely" in columns[1]) + columns[2]
    rows = []
    for name, goal in GOALS.items():
        (file,) = (results / "records-profiles" / name).glob("*/profile/kernels.json")
        found = read_json(file)
        times: Counter[str] = Counter()
        for kernel in found["kernels"]:  # these runs counted fused kernels as products or attention
            fused = kernel["group"] in GROUPS[:2] and kernel["name"].startswith("triton_")
            group = group_of_kernel(kernel["name"]) if fused else kernel["group"]
            times[group] += kernel["time_ms"] / found["steps"]
        others = sum(value for group, value in times.items() if group not in GROUPS)
        amounts = [found["step_ms"]["before"], *(times.get(group, 0.0) for group in GROUPS), others]
        busy = f"{100 * found['busy_share_unprofiled']:.0f} %"
        label = RECORDS["LABELS"].get(name, f"`{name}`").removesuffix(" (images/s)")
        cells = [label, f"{goal:,}", reached[name][1], *(f"{amount:.0f}" for amount in amounts), busy]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def test_the_page_on_profiles_states_the_committed_profiles():
    page = (ROOT / "docs/evidence/profiles.md").read_text("utf-8")
    rows = profile_rows()
    assert "\n".join(rows) in page

    def share(name: str, *words: str) -> tuple[float, float]:
        (file,) = (ROOT / "results/h200/records-profiles" / name).glob("*/profile/kernels.json")
        kernels = (profile := read_json(file))["kernels"]
        found = sum(each["time_ms"] for each in kernels if any(word in each["name"] for word in words))
        return found / profile["steps"], 100 * found / sum(each["time_ms"] for each in kernels)

    for recipe in ("fastest", "fastest-full"):
        assert f"- `{recipe}`: {share(recipe, 'nvjet')[1]:.0f} %" in page
    reached = next(int(row.split(" | ")[2].replace(",", "")) for row in rows if row.startswith("| `fastest` "))
    products = share("fastest", "nvjet")[1] / 100
    less = (1 - reached / GOALS["fastest"]) / (1 - products)  # of the time of the other kernels
    part = {4: "quarter", 5: "fifth", 6: "sixth"}[round(1 / less)]
    assert f"would have to take a {part} less" in " ".join(page.split())
    old = share(
        "fastest", "impl<at::native::AUnaryFunctor<float, float, float", "impl_nocast<at::native::bfloat16_copy"
    )
    assert f"{share('fastest-qlora', '_copy_scaled')[0]:.2f} instead of {old[0]:.2f} ms per step" in page
    words = " ".join(page.split())
    assert f"the products of the experts take {share('oss-fastest', 'GemmUniversal')[0]:.0f} ms" in words
    assert f"cuDNN computes the attention ({share('oss-fastest', 'cudnn')[0]:.0f} ms)" in words
    assert f"FlashAttention-2 computes it ({share('oss-fastest', 'pytorch_flash')[0]:.0f} ms)" in words
    assert f"adds the adapters of experts takes {share('oss-experts', '_add_products')[0]:.0f} ms" in words


def speeds_of(row: str, *sittings: str) -> list[float]:
    """Return the geometric mean of a row's tokens/s in each sitting. Skip sittings without this row."""
    files = [[*(ROOT / "results/h200/records").glob(f"{each}*/{row}/*/summary.json")] for each in sittings]
    return [geometric_mean(read_json(file)["tokens_per_s"]["real"] for file in found) for found in files if found]


def test_the_page_on_profiles_states_the_power_limit_the_clocks_and_the_effects_of_changes():
    page, results = (ROOT / "docs/evidence/profiles.md").read_text("utf-8"), ROOT / "results/h200"
    clocks: dict[bool, list[float]] = {False: [], True: []}
    for name in [*GOALS, *(f"moe-{each}" for each in ("fastest", "experts", "graph"))]:
        for file in (results / "records").glob(f"*/{name}/*/summary.json"):
            if file.parts[-4] >= "2026-11-27T13":
                bound = read_json(file)["bound"]
                assert bound["power_capped"] > 0.9
                clocks[name.startswith(("moe", "oss", "smallest"))].append(bound["sm_clock_mhz"])
    others, experts = (f"{min(each):,.0f} to {max(each):,.0f}" for each in ([10 * round(one / 10) for one in some]
                       for some in clocks.values()))  # fmt: skip
    text = " ".join(page.split())
    assert "In all rows, the card is at its power limit of 700 W" in text
    assert f"from 1,980 MHz: to {experts} MHz with experts and `smallest`, and to {others} MHz in the other" in text

    def median(folder: Path, *keys: str) -> float:
        found = sorted(read_json(file)[keys[0]][keys[1]] for file in folder.glob("*/summary.json"))
        return found[len(found) // 2]

    for kernels, base in (("kernels", "base"), ("kernels-fp8", "fp8")):
        steps = [median(results / "images-kernels" / each, "step_time_s", "median") for each in (kernels, base)]
        assert round(100 * (1 - steps[0] / steps[1])) == 4
    assert "likely: the median step takes 4 % less time, in 16 bits and with fp8" in page
    speeds = [median(results / "images-kernels" / each, "tokens_per_s", "real") for each in ("kernels", "base")]
    assert round(100 * (1 - speeds[0] / speeds[1])) == 3
    sittings = ("2026-11-28T1711-ac54eae4-f5085587", "2026-11-28T1354-9a4394cf-84608fb2")
    new, old = (results / "records" / each / "smallest-full" for each in sittings)
    device, speed = ([median(each, *key) for each in (new, old)]
                     for key in (("memory_gb", "device_peak"), ("tokens_per_s", "real")))  # fmt: skip
    assert f"{device[0]:.2f} instead of {device[1]:.2f} GiB, but {speed[0]:,.0f} instead of {speed[1]:,.0f} tok" in page
    left = [
        read_json(path)
        for path in (results / "records").glob("2026-11-28T2206*/.left-out/smallest-full/*/summary.json")
    ]
    speeds = sorted(round(each["tokens_per_s"]["real"]) for each in left)
    assert {f"{each['memory_gb']['device_peak']:.2f}" for each in left} == {"5.32"}
    assert f"{speeds[0]:,} to {speeds[-1]:,} tokens/s and 5.32 GiB. These three runs were left out" in page
    new, newer, newest, four_bits, short, gates = (
        next((results / "records").glob(f"2026-11-{at}*"))
        for at in ("28T2001", "28T2253", "29T0156", "29T0923", "29T1223", "29T1512")
    )
    oss, headline = "2026-11-28T1402-ac0616f3-84608fb2", "2026-11-27T1300-31f0b75e-0ed9c54a"
    tokens, images = ("tokens_per_s", "real"), ("images_per_s", "images")
    for folder, sitting, row, keys, digits in (
        (new, "2026-11-28T1711-976d01ab-f5085587", "moe-fastest", tokens, 0),
        (new / ".left-out", "2026-11-28T1015-cbbea112-1b5eba68", "moe-experts", tokens, 0),
        (new / ".left-out", "2026-11-28T1015-cbbea112-1b5eba68", "moe-experts", ("memory_gb", "device_peak"), 1),
        (new, oss, "images-fastest-fp8", images, 2),
        (newer / "moe-graph", f"{new.name}/.left-out/moe-experts", "", tokens, 0),
        (newer, oss, "oss-fastest", tokens, 0),
        (newest, newer.name, "oss-fastest", tokens, 0),
        (four_bits, headline, "fastest-qlora", tokens, 0),
        (four_bits, headline, "fastest-qlora", ("memory_gb", "device_peak"), 1),
        (short, "2026-11-28T1354-9a4394cf-84608fb2", "short-fastest", tokens, 0),
        (gates, "2026-11-28T1354-9a4394cf-84608fb2", "full-fp8", tokens, 0),
        (newer / "oss-graph", f"{oss}/oss-experts", "", tokens, 0),
    ):
        now, earlier = (
            geometric_mean(read_json(file)[keys[0]][keys[1]] for file in (each / row).glob("*/summary.json"))
            for each in (folder, results / "records" / sitting)
        )
        assert f"{now:,.{digits}f} instead of {earlier:,.{digits}f} " in page
        if row == "fastest-qlora":
            reference = " ".join((ROOT / "docs/reference/optimizations.md").read_text("utf-8").split())
            assert f"{now:,.{digits}f} instead of {earlier:,.{digits}f} " in reference
    before = ("2026-11-27T1300", "2026-11-27T1122")
    after = ("2026-11-29T2055", "2026-11-30T0625", "2026-11-29T1512", "2026-11-30T1915")
    for row, sentence in (
        ("fastest", "{} to {} tokens/s before this change (two cards), and {} to {} after it (four cards"),
        ("fastest-fp8", "instead of {} to {} tokens/s (two cards each), 1.73 instead of 1.68 times"),
    ):
        ends = [f"{each:,.0f}" for found in (speeds_of(row, *before), speeds_of(row, *after))
                for each in (min(found), max(found))]  # fmt: skip
        assert sentence.format(*ends) in page
        assert row != "fastest-fp8" or f"{ends[2]} to {ends[3]} {sentence.format(*ends)}" in page
    busy = [read_json(file)["bound"]["gpu_busy"] for sitting in ("2026-11-29T1512", "2026-11-29T2055")
            for file in (results / "records").glob(f"{sitting}*/fastest-fp8/*/summary.json")]  # fmt: skip
    assert f"busy for {100 * min(busy):.0f} to {100 * max(busy):.0f} % of the time" in page
    speeds = speeds_of("smallest", "2026-11-28T2222", "2026-11-28T2206", "2026-11-28T1711-ac54eae4")
    sentence = "{:,.0f} tokens/s, and likely {:,.0f} on another card (two runs), instead of {:,.0f} on a third card"
    assert sentence.format(*speeds) in page
    speeds = [read_json(file)["tokens_per_s"]["real"] for file in (newest / "oss-experts").glob("*/summary.json")]
    assert f"now {geometric_mean(speeds):,.0f} tokens/s without a graph" in page
