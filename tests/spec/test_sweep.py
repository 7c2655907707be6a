import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftbench.errors import SpecError
from ftbench.spec import identity, sweep
from ftbench.spec.load import load
from ftbench.spec.sweep import cells

MODEL = "model: {id: tiny/qwen3, weights: random}\n"


@pytest.fixture
def grid(tmp_path):
    """The cells of one text with a random tiny model, with `--axis`es."""

    def read(text, *axes, sets=()):
        path = tmp_path / "spec.yaml"
        path.write_text(MODEL + text, "utf-8")
        return cells(path, sets, axes)

    return read


@pytest.fixture
def points(grid):
    """The places of those cells on each axis."""
    return lambda *given_, **more: [tuple(cell.values.values()) for cell in grid(*given_, **more)]


@pytest.fixture
def problems(grid, tmp_path):
    """The sentences told about one text, each without the folder it lies in."""

    def read(text, *axes):
        with pytest.raises(SpecError) as caught:
            grid(text, *axes)
        assert caught.value.exit_code == 2
        return [problem.replace(f"{tmp_path}/", "") for problem in caught.value.problems]

    return read


# --- which cells there are -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "sweep:\n", "sweep: {}\n", "sweep: {axes: {}}\n"])
def test_a_spec_in_which_nothing_varies_is_one_cell(grid, text):
    (cell,) = grid(text)
    assert (cell.values, cell.sets, cell.refused) == ({}, (), None)
    assert cell.spec.train.batch_size == 4


def test_cells_are_the_product_of_the_axes_the_last_one_turning_fastest(points):
    assert points("sweep: {axes: {method: [qlora, lora], train.batch_size: [4, 1, 2]}}") == [
        ("qlora", 4), ("qlora", 1), ("qlora", 2), ("lora", 4), ("lora", 1), ("lora", 2),
    ]  # fmt: skip


def test_each_cell_is_the_spec_at_its_place(grid):
    for cell in grid("train: {seed: 7}\nsweep: {axes: {method: [qlora, lora], train.batch_size: [1, 2]}}"):
        assert (cell.spec.method.name, cell.spec.train.batch_size) == tuple(cell.values.values())
        assert (cell.spec.train.seed, cell.spec.name, cell.refused) == (7, "spec", None)


@given(sizes=st.lists(st.integers(1, 4), max_size=4))
def test_the_number_of_cells_is_the_product_of_the_lengths(tmp_path_factory, sizes):
    keys = ["train.batch_size", "train.seed", "train.max_steps", "dataset.samples"]
    axes = {key: list(range(1, size + 1)) for key, size in zip(keys, sizes, strict=False)}
    path = tmp_path_factory.getbasetemp() / "product.yaml"
    path.write_text(f"{MODEL}sweep: {{axes: {axes}}}")
    assert [tuple(cell.values.values()) for cell in cells(path, ())] == list(itertools.product(*axes.values()))


def test_a_value_may_be_a_whole_section(grid):
    found = grid("sweep: {axes: {method: [{name: lora, rank: 32}, {name: qlora, quant_type: fp4}, full]}}")
    assert [cell.spec.method.name for cell in found] == ["lora", "qlora", "full"]
    assert (found[0].spec.method.rank, found[1].spec.method.quant_type) == (32, "fp4")


def test_options_that_still_mean_something_outlive_a_step_of_the_axis(grid):
    found = grid("method: {name: qlora, rank: 32, double_quant: false}\nsweep: {axes: {method: [lora, qlora, full]}}")
    assert [getattr(cell.spec.method, "rank", None) for cell in found] == [32, 32, None]
    assert found[1].spec.method.double_quant is False


def test_a_value_may_be_a_list(grid):
    found = grid("sweep: {axes: {method.targets: [[q_proj], [q_proj, v_proj], all-linear]}}")
    assert [cell.spec.method.targets for cell in found] == [("q_proj",), ("q_proj", "v_proj"), "all-linear"]


def test_a_switch_may_be_an_axis(grid):
    found = grid("sweep: {axes: {optimizations.compile: [off, on], optimizations.fp8: [off, rowwise]}}")
    options = [cell.spec.optimizations for cell in found]
    assert [(part.compile, part.fp8) for part in options] == [
        (False, "off"), (False, "rowwise"), (True, "off"), (True, "rowwise"),
    ]  # fmt: skip


def test_sets_are_shared_by_all_cells_and_an_axis_wins_over_them(grid):
    found = grid("sweep: {axes: {train.batch_size: [1, 2]}}", sets=["train.seed=3", "train.batch_size=9"])
    assert [(cell.spec.train.batch_size, cell.spec.train.seed) for cell in found] == [(1, 3), (2, 3)]


def test_a_sweep_is_inherited_with_the_file_that_is_extended(tmp_path):
    (tmp_path / "base.yaml").write_text(f"{MODEL}sweep: {{axes: {{train.batch_size: [1, 2]}}}}\n")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\nsweep: {exclude: [{train.batch_size: 1}]}\n")
    assert [cell.values for cell in cells(tmp_path / "mine.yaml", ())] == [{"train.batch_size": 2}]


# --- axes that advance together --------------------------------------------------------------------------------------


def test_axes_of_one_group_advance_together(points):
    text = "sweep: {axes: {train.batch_size: [1, 2, 4], train.gradient_accumulation_steps: [8, 4, 2]}, zip: [%s]}"
    group = "[train.batch_size, train.gradient_accumulation_steps]"
    assert points(text % group) == [(1, 8), (2, 4), (4, 2)]
    assert points(text % "[train.gradient_accumulation_steps, train.batch_size]") == [(1, 8), (2, 4), (4, 2)]


def test_a_group_turns_where_its_first_axis_stands_beside_the_others(points):
    text = "{axes: {train.batch_size: [1, 2], method: [lora, full], train.seed: [5, 6]}, zip: [[%s]]}"
    assert points("sweep: " + text % "train.batch_size, train.seed") == [
        (1, "lora", 5), (1, "full", 5), (2, "lora", 6), (2, "full", 6),
    ]  # fmt: skip
    assert points("sweep: " + text % "train.seed, train.batch_size") == [
        (1, "lora", 5), (2, "lora", 6), (1, "full", 5), (2, "full", 6),
    ]  # fmt: skip


def test_two_groups_are_multiplied(points):
    text = """sweep:
      axes: {train.batch_size: [1, 2], train.seed: [3, 4], train.max_steps: [5, 6], dataset.samples: [7, 8]}
      zip: [[train.batch_size, train.seed], [train.max_steps, dataset.samples]]
    """
    assert points(text) == [(1, 3, 5, 7), (1, 3, 6, 8), (2, 4, 5, 7), (2, 4, 6, 8)]


# --- cells that are left out -----------------------------------------------------------------------------------------

METHODS_AND_BATCHES = "sweep:\n  axes: {method: [lora, qlora, full], train.batch_size: [1, 2, 4]}\n  exclude: "


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("[{method: full}]", "lora1 lora2 lora4 qlora1 qlora2 qlora4"),
        ("[{method.name: full}]", "lora1 lora2 lora4 qlora1 qlora2 qlora4"),
        ("[{method: {name: full}}]", "lora1 lora2 lora4 qlora1 qlora2 qlora4"),
        ("[{method: full, train.batch_size: 4}]", "lora1 lora2 lora4 qlora1 qlora2 qlora4 full1 full2"),
        ("[{method: full, train.batch_size: [2, 4]}]", "lora1 lora2 lora4 qlora1 qlora2 qlora4 full1"),
        ("[{method: [full, qlora], train.batch_size: [1, 2]}]", "lora1 lora2 lora4 qlora4 full4"),
        ("[{method: full}, {train.batch_size: 4}]", "lora1 lora2 qlora1 qlora2"),
        ("[{method: unsloth}]", "lora1 lora2 lora4 qlora1 qlora2 qlora4 full1 full2 full4"),
        ("[{method.double_quant: on}]", "lora1 lora2 lora4 full1 full2 full4"),
    ],
)
def test_cells_that_have_all_values_of_a_line_of_exclude_are_left_out(points, pattern, left):
    assert " ".join(f"{method}{batch}" for method, batch in points(METHODS_AND_BATCHES + pattern)) == left


def test_what_no_axis_varies_may_be_excluded_by(points):
    text = (
        "train: {seed: 7}\nsweep: {axes: {train.batch_size: [1, 2]}, exclude: [{train.seed: %s, train.batch_size: 1}]}"
    )
    assert points(text % 7) == [(2,)]
    assert points(text % 8) == [(1,), (2,)]


@pytest.mark.parametrize(
    ("key", "values", "excluded", "left"),
    [
        ("optimizations.compile", "[off, on]", "off", [True]),
        ("optimizations.fp8", "[off, rowwise]", "off", ["rowwise"]),
        ("measure.eval", "[off, end]", "off", ["end"]),
        ("launch.no_step_s", "[off, 5]", "off", [5]),
        ("train.learning_rate", "[1e-4, 2e-4]", "1e-4", [2e-4]),
        ("train.learning_rate", "[1.0e-4, 2.0e-4]", "1e-4", [2e-4]),
        ("method.targets", "[[q_proj], [q_proj, v_proj]]", "[q_proj]", [["q_proj", "v_proj"]]),
        ("method.targets", "[[q_proj], [q_proj, v_proj]]", "[[q_proj], all-linear]", [["q_proj", "v_proj"]]),
    ],
)
def test_a_value_of_exclude_means_what_it_means_elsewhere_in_a_spec(points, key, values, excluded, left):
    text = f"sweep: {{axes: {{{key}: {values}}}, exclude: [{{{key}: {excluded}}}]}}"
    assert [place for (place,) in points(text)] == left


def test_a_file_of_exclude_is_that_of_the_axis(points):
    text = "sweep: {axes: {dataset.path: [a.jsonl, b.jsonl]}, exclude: [{dataset.path: a.jsonl}]}"
    assert len(points("dataset: {name: file, path: c.jsonl}\n" + text)) == 1


def test_a_combination_that_cannot_work_may_be_excluded(grid):
    text = "sweep: {axes: {method: [lora, full], optimizations.fp8: [off, rowwise]}, exclude: [%s]}"
    for pattern in ("{method: full, optimizations.fp8: rowwise}", "{method.name: [full], optimizations.fp8: rowwise}"):
        assert [cell.refused for cell in grid(text % pattern)] == [None] * 3


def test_a_combination_that_cannot_work_may_be_excluded_by_what_is_so_by_default(grid):
    found = grid("""sweep:
      axes: {train.precision: [bf16, fp16], optimizations.fp8: [off, rowwise]}
      exclude: [{method: lora, train.precision: fp16, optimizations.fp8: rowwise}]
    """)
    assert [cell.refused for cell in found] == [None] * 3


def test_an_exclude_that_leaves_nothing_is_told(problems):
    assert problems("sweep: {axes: {method: [lora]}, exclude: [{method: lora}]}") == [
        "spec.yaml: sweep.exclude leaves no cell"
    ]


# --- axes of the command line ----------------------------------------------------------------------------------------


def test_an_axis_of_the_command_line_needs_no_sweep_in_the_file(grid):
    found = grid("", "method=lora,qlora", "train.batch_size=1, 2", "optimizations.compile=off,on")
    assert len(found) == 8
    last = found[-1].spec
    assert (last.method.name, last.train.batch_size, last.optimizations.compile) == ("qlora", 2, True)


def test_an_axis_of_the_command_line_wins_over_that_of_the_file_in_its_place(points):
    text = "sweep: {axes: {train.batch_size: [1, 2, 4], method: [lora, full]}}"
    assert points(text, "train.batch_size=16") == [(16, "lora"), (16, "full")]


def test_an_axis_of_the_command_line_may_have_one_value_and_sections(points):
    assert points("", "train.batch_size=8") == [(8,)]
    assert points("", "method={name: lora, rank: 32},full") == [({"name": "lora", "rank": 32},), ("full",)]


def test_files_on_the_command_line_are_taken_from_the_current_folder(grid, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = grid("dataset: {name: file, path: c.jsonl}", "dataset.path=a.jsonl,../b.jsonl")
    paths = [cell.spec.dataset.path for cell in found]
    assert paths == [str(tmp_path / "here" / "a.jsonl"), str(tmp_path / "b.jsonl")]


@pytest.mark.parametrize("text", ["train.batch_size", "train.batch_size=", "train.batch_size= ", "a.b=1,,2", "a=[1,2"])
def test_an_axis_that_is_none_says_how_to_write_one(problems, text):
    (told,) = problems("", text)
    assert told == f"--axis {text}: write it as key=value,value, for example train.batch_size=1,2,4"


@pytest.mark.parametrize("text", ["=1,2", "train..batch_size=1", "name=a,b", "sweep=1", "extends=a", "trian.seed=1"])
def test_a_key_that_can_be_no_axis_is_told_with_the_axis(problems, text):
    (told,) = problems("", text)
    key = text.partition("=")[0]
    assert told.startswith(f"--axis {key}: {key!r} cannot be an axis")
    assert "train.batch_size; `ftbench list keys` shows all" in told
    assert ("did you mean train?" in told) == (key.startswith("tr"))


def test_a_wrong_value_on_the_command_line_is_told_with_the_axis(problems):
    (told,) = problems("", "train.batch_size=1,0,2")
    assert told == "--axis train.batch_size: train.batch_size: 0: must be greater than or equal to 1"


# --- files -----------------------------------------------------------------------------------------------------------

FILES = "dataset: {name: file, path: c.jsonl}\nsweep: {axes: {dataset.path: [a.jsonl, ../b.jsonl, /c.jsonl]}}\n"


def test_files_of_an_axis_are_taken_from_the_folder_of_the_spec(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "spec.yaml").write_text(MODEL + FILES)
    paths = [cell.spec.dataset.path for cell in cells(tmp_path / "sub" / "spec.yaml", ())]
    assert paths == [str(tmp_path / "sub" / "a.jsonl"), str(tmp_path / "b.jsonl"), "/c.jsonl"]


def test_files_in_a_section_of_an_axis_are_taken_from_there_too(grid, tmp_path):
    found = grid("sweep: {axes: {dataset: [sample, {name: file, path: a.jsonl}]}}")
    assert [cell.spec.dataset.path for cell in found] == [None, str(tmp_path / "a.jsonl")]


def test_files_of_an_inherited_axis_are_taken_from_the_folder_of_the_file_that_says_them(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "base.yaml").write_text(MODEL + FILES)
    (tmp_path / "mine.yaml").write_text("extends: sub/base.yaml\n")
    paths = [cell.spec.dataset.path for cell in cells(tmp_path / "mine.yaml", ())]
    assert paths == [str(tmp_path / "sub" / "a.jsonl"), str(tmp_path / "b.jsonl"), "/c.jsonl"]


# --- what makes a cell again -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "axes",
    [
        "{method: [lora, {name: qlora, rank: 4}, full], train.batch_size: [1, 2]}",
        "{optimizations.compile: [on, off], optimizations.fp8: [off, rowwise], measure.eval: [off, end]}",
        "{train.learning_rate: [1e-5, 2.0e-4, 0.00001], train.max_steps: [null, 3]}",
        "{method.targets: [[q_proj, v_proj], all-linear], launch.no_step_s: [auto, off, 5]}",
        "{model.revision: [main, '2024', '1.0', 'on', 'null', '[a]', 'a: b', '']}",
        "{dataset: [{name: file, path: a b.jsonl}, {name: file, path: 日本語.jsonl}, sample]}",
    ],
)
def test_the_sets_of_a_cell_make_it_of_the_spec_file_again(grid, tmp_path, monkeypatch, axes):
    monkeypatch.chdir(tmp_path)
    for cell in grid(f"sweep: {{axes: {axes}}}"):
        again = load(tmp_path / "spec.yaml", cell.sets)
        assert again == cell.spec
        assert identity.fingerprint(again) == identity.fingerprint(cell.spec)


def test_the_sets_of_a_cell_name_the_same_file_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "spec.yaml").write_text(MODEL + FILES)
    found = cells(tmp_path / "spec.yaml", ())
    monkeypatch.chdir("/")
    assert [load(tmp_path / "spec.yaml", cell.sets) for cell in found] == [cell.spec for cell in found]


# --- combinations that cannot work -----------------------------------------------------------------------------------


def test_a_combination_that_cannot_work_is_a_refused_cell_beside_the_others(grid):
    found = grid("sweep: {axes: {method: [lora, qlora, full], optimizations.fp8: [off, rowwise]}}")
    assert [cell.spec is None for cell in found] == [False, False, False, True, False, True]
    assert [cell.refused is None for cell in found] == [True, True, True, False, True, False]
    assert found[3].values == {"method": "qlora", "optimizations.fp8": "rowwise"}
    assert found[3].refused.startswith("optimizations.fp8 needs 16-bit base weights and method qlora stores 4-bit ones")
    assert found[5].refused.startswith("optimizations.fp8 converts frozen base layers and method full has none")


def test_a_cell_that_is_refused_for_two_reasons_says_both(grid):
    (cell,) = grid("", "method=qlora", "optimizations.fp8=rowwise", "train.precision=fp16")
    assert "16-bit base weights" in cell.refused
    assert "keeps the adapters of a quantised model in bfloat16" in cell.refused


def test_a_base_that_cannot_work_is_a_refused_cell_too(grid):
    (cell,) = grid("method: full\noptimizations: {fp8: rowwise}\n")
    assert (cell.values, cell.spec) == ({}, None)
    assert cell.refused


def test_a_combination_within_one_section_that_cannot_work_is_a_refused_cell(grid):
    text = "dataset: {name: synthetic, samples: 8, length: 64}\nsweep: {axes: {%s}}"
    found = grid(text % "dataset.length: [128, 4096], dataset.max_length: [1024, 8192]")
    assert [cell.spec is None for cell in found] == [False, False, True, False]
    assert "`length` 4096 is larger than `max_length` 1024" in found[2].refused


def test_a_combination_within_one_section_that_cannot_work_may_be_excluded(grid):
    text = "dataset: {name: synthetic, samples: 8, length: 64}\nsweep: {axes: {%s}, exclude: [%s]}"
    axes = "dataset.length: [128, 4096], dataset.max_length: [1024, 8192]"
    found = grid(text % (axes, "{dataset.length: 4096, dataset.max_length: 1024}"))
    assert [cell.refused for cell in found] == [None] * 3


# --- mistakes --------------------------------------------------------------------------------------------------------


MISTAKES = [
    ("sweep: 5\n", 2, "sweep: must be a section of keys: {axes: {train.batch_size: [1, 2, 4]}}"),
    ("sweep: [a]\n", 2, "sweep: must be a section of keys"),
    ("sweep:\n  axes: 5\n", 3, "sweep.axes: must be a section of keys"),
    ("sweep:\n  axis: {train.seed: [1]}\n", None, "sweep.axis: no such key; did you mean axes?"),
    ("sweep:\n  axes:\n    train.seed: 5\n", None, "sweep.axes: train.seed: give it a list of values: [1, 2, 4]"),
    ("sweep:\n  axes:\n    train.seed: []\n", None, "sweep.axes: train.seed: give it a list of values"),
    ("sweep:\n  axes:\n    train.seed:\n", None, "sweep.axes: train.seed: give it a list of values"),
    ("sweep:\n  axes:\n    method: lora\n", None, "sweep.axes: method: give it a list of values"),
    ("sweep:\n  exclude: 5\n", 3, "sweep.exclude: 5: must be"),
    ("sweep:\n  exclude: [5]\n", 3, "sweep.exclude: must be"),
    ("sweep:\n  zip: [a, b]\n", 3, "sweep.zip: 'a': must be"),
    ("sweep:\n  axes:\n    name: [a, b]\n", 4, "'name' cannot be an axis"),
    ("sweep:\n  axes:\n    train.seed: [1]\n    trian.seed: [1]\n", 5, "did you mean train?"),
    ("sweep:\n  axes:\n    train..seed: [1]\n", 4, "'train..seed' cannot be an axis"),
    ("sweep:\n  axes:\n    train.sed: [1]\n", 4, "sweep.axes: train.sed: no such key; did you mean seed?"),
    ("sweep:\n  axes:\n    train.seed: [1, x]\n", 4, "sweep.axes: train.seed: 'x' must be"),
    ("sweep:\n  axes:\n    train.batch_size: [1, 0]\n", 4, "sweep.axes: train.batch_size: 0: must be"),
    ("sweep:\n  axes:\n    train.batch_size: [on]\n", 4, "sweep.axes: train.batch_size: True must be a number, not on"),
    ("sweep:\n  axes:\n    method: [lora, qlorra]\n", 4, "'qlorra' is not allowed; did you mean qlora?"),
    ("sweep:\n  axes:\n    train: [5]\n", 4, "sweep.axes: train: 5 is not a section"),
    ("sweep:\n  axes: {train.seed: [1]}\n  exclude: [{train.sed: 1}]\n", 4,
     "sweep.exclude: train.sed is not a key of a spec; did you mean train.seed?"),
    ("sweep:\n  axes: {train.seed: [1]}\n  zip: [[train.seed, train.sed]]\n", 4,
     "sweep.zip: train.sed is not an axis of this sweep; did you mean train.seed?"),
    ("sweep:\n  axes: {train.seed: [1, 2], train.batch_size: [1]}\n  zip: [[train.seed, train.batch_size]]\n", 4,
     "sweep.zip: axes that advance together need the same number of values: train.seed has 2, train.batch_size has 1"),
    ("sweep:\n  axes: {train.seed: [1]}\n  zip: [[train.seed], [train.seed]]\n", 4,
     "sweep.zip: train.seed appears twice; an axis belongs to one group"),
    ("sweep:\n  axes: {train.seed: [1]}\n  zip: [[train.seed, train.seed]]\n", 4, "train.seed appears twice"),
    ("sweep:\n  axes: {train.seed: [1]}\ntrain: {batch_size: 0}\n", 4, "train.batch_size: 0: must be greater"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "where", "what"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_told_with_its_line(problems, text, where, what):
    (told,) = problems(text)
    file, line, sentence = told.split(":", 2)
    assert file == "spec.yaml"
    assert line.isdecimal(), told
    assert where is None or int(line) == where, told
    assert what in sentence


@pytest.mark.parametrize("axis", ["train.seed=1,2 #,4", "train.seed=1]#", "train.seed=1 # two"])
def test_no_value_of_an_axis_is_dropped_as_a_comment(problems, axis):
    assert problems("", axis) == [f"--axis {axis}: write it as key=value,value, for example train.batch_size=1,2,4"]


def test_axes_that_say_other_keys_of_a_section_go_together(points):
    assert len(points("", "method=lora,qlora", "method.rank=8,16")) == 4


def test_each_mistake_is_told_once_however_many_cells_have_it(problems):
    told = problems("sweep: {axes: {train.seed: [1, 2, 3], train.batch_size: [0, 1], method: [lora, qlorra]}}")
    assert len(told) == 2
    assert "train.batch_size: 0:" in told[0]
    assert "'qlorra' is not allowed" in told[1]


def test_a_mistake_in_an_inherited_axis_is_told_with_the_file_that_says_it(tmp_path):
    (tmp_path / "base.yaml").write_text(f"{MODEL}sweep:\n  axes:\n    train.batch_size: [0]\n")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\nsweep: {exclude: [{train.seed: 1}]}\n")
    with pytest.raises(SpecError, match=r"base\.yaml:4: sweep\.axes: train\.batch_size: 0: must be"):
        cells(tmp_path / "mine.yaml", ())


# --- as many cells as can be planned ---------------------------------------------------------------------------------


def test_more_cells_than_can_be_planned_are_told_before_any_is_made(problems):
    seeds, batches = ",".join(map(str, range(500))), ",".join(map(str, range(1, 302)))
    assert problems("", f"train.seed={seeds}", f"train.batch_size={batches}") == [
        "the sweep has 150,500 cells; at most 100,000 are planned at once: split it"
    ]


def test_exactly_as_many_as_can_be_planned_are(points, problems, monkeypatch):
    monkeypatch.setattr(sweep, "MAX_CELLS", 6)
    assert len(points("", "train.seed=1,2", "train.batch_size=1,2,3")) == 6
    assert problems("", "train.seed=1,2,3,4,5,6,7")[0].startswith("the sweep has 7 cells; at most 6 are planned")


def test_axes_that_advance_together_count_once(points, monkeypatch):
    monkeypatch.setattr(sweep, "MAX_CELLS", 3)
    text = "sweep: {axes: {train.seed: [1, 2, 3], train.batch_size: [1, 2, 3]}, zip: [[train.seed, train.batch_size]]}"
    assert len(points(text)) == 3
