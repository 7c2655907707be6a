import pytest

from ftbench.errors import SpecError
from ftbench.spec import identity
from ftbench.spec.load import load
from ftbench.spec.sweep import cells

MODEL = "model: {id: tiny/qwen3, weights: random}\n"


@pytest.fixture
def grid(tmp_path):
    """Return a function that returns the cells of a sweep of a tiny model."""

    def read(text, *axes, sets=()):
        path = tmp_path / "spec.yaml"
        path.write_text(MODEL + text, "utf-8")
        return cells(path, sets, axes)

    return read


@pytest.fixture
def points(grid):
    """Return a function that returns the axis values of the cells."""
    return lambda *given_, **more: [tuple(cell.values.values()) for cell in grid(*given_, **more)]


@pytest.fixture
def problems(grid, tmp_path):
    """Return a function that returns the error messages of a spec, without the folder."""

    def read(text, *axes):
        with pytest.raises(SpecError) as caught:
            grid(text, *axes)
        assert caught.value.exit_code == 2
        return [problem.replace(f"{tmp_path}/", "") for problem in caught.value.problems]

    return read


# --- cells -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "sweep:\n", "sweep: {axes: {}}\n"])
def test_spec_without_axes_is_one_cell(grid, text):
    (cell,) = grid(text)
    assert (cell.values, cell.sets, cell.refused) == ({}, (), None)
    assert cell.spec.train.batch_size == 4


def test_cells_are_the_product_of_the_axes(points):
    assert points("sweep: {axes: {method: [qlora, lora], train.batch_size: [4, 1, 2]}}") == [
        ("qlora", 4), ("qlora", 1), ("qlora", 2), ("lora", 4), ("lora", 1), ("lora", 2),
    ]  # fmt: skip


def test_sweep_section_is_inherited_and_its_sections_can_be_axes(tmp_path):
    axes = "sweep: {axes: {launch: [{gpus: 1}, {gpus: 2, strategy: fsdp}]}}"
    (tmp_path / "base.yaml").write_text(f"{MODEL}{axes}\n")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\ntrain: {batch_size: 2}\n")
    launches = [cell.spec.launch for cell in cells(tmp_path / "mine.yaml", ())]
    assert [(each.gpus, each.strategy) for each in launches] == [(1, "none"), (2, "fsdp")]


# --- axes of the command line ----------------------------------------------------------------------------------------


def test_command_line_axis_needs_no_sweep_section(grid):
    found = grid("", "method=lora,qlora", "train.batch_size=1, 2", "optimizations.compile=off,on")
    assert len(found) == 8
    last = found[-1].spec
    assert (last.method.name, last.train.batch_size, last.optimizations.compile) == ("qlora", 2, True)


def test_command_line_axis_replaces_the_axis_of_the_file(points):
    text = "sweep: {axes: {train.batch_size: [1, 2, 4], method: [lora, full]}}"
    assert points(text, "train.batch_size=16") == [(16, "lora"), (16, "full")]


@pytest.mark.parametrize("text", ["train.batch_size", "train.batch_size=", "a.b=1,,2", "a=[1,2"])
def test_malformed_axis_shows_the_syntax(problems, text):
    (message,) = problems("", text)
    assert message == f"--axis {text}: write it as key=value,value, for example train.batch_size=1,2,4"


@pytest.mark.parametrize("text", ["=1,2", "name=a,b", "sweep=1", "trian.seed=1"])
def test_invalid_axis_key_is_an_error(problems, text):
    (message,) = problems("", text)
    key = text.partition("=")[0]
    assert message.startswith(f"--axis {key}: {key!r} cannot be an axis")
    assert "train.batch_size; `ftbench list keys` shows all" in message
    assert ("did you mean train?" in message) == (key.startswith("tr"))


# --- files -----------------------------------------------------------------------------------------------------------

FILES = "dataset: {name: file, path: c.jsonl}\nsweep: {axes: {dataset.path: [a.jsonl, ../b.jsonl, /c.jsonl]}}\n"


def test_axis_paths_are_relative_to_the_spec(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "spec.yaml").write_text(MODEL + FILES)
    paths = [cell.spec.dataset.path for cell in cells(tmp_path / "sub" / "spec.yaml", ())]
    assert paths == [str(tmp_path / "sub" / "a.jsonl"), str(tmp_path / "b.jsonl"), "/c.jsonl"]


# --- sets of a cell --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "axes",
    [
        "{method: [lora, {name: qlora, rank: 4}, full], train.batch_size: [1, 2]}",
        "{optimizations.compile: [on, off], optimizations.fp8: [off, tensorwise], measure.eval: [off, end]}",
        "{train.learning_rate: [1e-5, 2.0e-4, 0.00001], train.max_steps: [null, 3]}",
        "{method.targets: [[q_proj, v_proj], all-linear], launch.no_step_s: [auto, off, 5]}",
        "{model.revision: [main, '2024', '1.0', 'on', 'null', '[a]', 'a: b', '']}",
        "{dataset: [{name: file, path: a b.jsonl}, {name: file, path: 日本語.jsonl}, sample]}",
    ],
)
def test_sets_of_a_cell_reproduce_it(grid, tmp_path, monkeypatch, axes):
    monkeypatch.chdir(tmp_path)
    for cell in grid(f"sweep: {{axes: {axes}}}"):
        again = load(tmp_path / "spec.yaml", cell.sets)
        assert again == cell.spec
        assert identity.fingerprint(again) == identity.fingerprint(cell.spec)


# --- impossible combinations -----------------------------------------------------------------------------------------


def test_impossible_combination_is_a_refused_cell(grid):
    found = grid("sweep: {axes: {method: [lora, qlora, full], optimizations.fp8: [off, tensorwise-delayed]}}")
    assert [cell.spec is None for cell in found] == [False, False, False, True, False, True]
    assert [cell.refused is None for cell in found] == [True, True, True, False, True, False]
    assert found[3].values == {"method": "qlora", "optimizations.fp8": "tensorwise-delayed"}
    assert found[3].refused.startswith("optimizations.fp8 needs 16-bit base weights and method qlora stores 4-bit ones")
    assert found[5].refused.startswith("optimizations.fp8 tensorwise-delayed supports only frozen layers")


# --- mistakes --------------------------------------------------------------------------------------------------------


MISTAKES = [
    ("sweep: 5\n", 2, "sweep: must be a section of keys: {axes: {train.batch_size: [1, 2, 4]}}"),
    ("sweep:\n  axes: 5\n", 3, "sweep.axes: must be a section of keys"),
    ("sweep:\n  axis: {train.seed: [1]}\n", None, "sweep.axis: no such key; did you mean axes?"),
    ("sweep:\n  axes:\n    train.seed: 5\n", None, "sweep.axes.train.seed: 5 must be a list"),
    ("sweep:\n  axes:\n    train.seed: []\n", None, "sweep.axes.train.seed: [] must have at least 1 item"),
    ("sweep:\n  axes:\n    name: [a, b]\n", 4, "'name' cannot be an axis"),
    ("sweep:\n  axes:\n    train.seed: [1]\n    trian.seed: [1]\n", 5, "did you mean train?"),
    ("sweep:\n  axes:\n    train.sed: [1]\n", 4, "sweep.axes: train.sed: no such key; did you mean seed?"),
    ("sweep:\n  axes:\n    train.seed: [1, x]\n", 4, "sweep.axes: train.seed: 'x' must be"),
    ("sweep:\n  axes:\n    train.batch_size: [on]\n", 4, "sweep.axes: train.batch_size: True must be a number, not on"),
    ("sweep:\n  axes:\n    method: [lora, qlorra]\n", 4, "'qlorra' is not allowed; did you mean qlora?"),
    ("sweep:\n  axes:\n    method: [lora, qlora]\n    method.name: [lora]\n", 5,
     "method.name and method are axes that both set method.name: remove method.name, or remove method"),
    ("sweep:\n  axes:\n    method: [{name: lora, rank: 4}]\n    method.rank: [8]\n", 5,
     "method.rank and method are axes that both set method.rank: remove method.rank, or remove method"),
    ("sweep:\n  axes: {train.seed: [1]}\ntrain: {batch_size: 0}\n", 4, "train.batch_size: 0 must be greater"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "where", "what"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistake_has_its_line(problems, text, where, what):
    (message,) = problems(text)
    file, line, sentence = message.split(":", 2)
    assert file == "spec.yaml"
    assert line.isdecimal(), message
    assert where is None or int(line) == where, message
    assert what in sentence


def test_mistake_is_reported_once(problems):
    message = problems("sweep: {axes: {train.seed: [1, 2, 3], train.batch_size: [0, 1], method: [lora, qlorra]}}")
    assert len(message) == 2
    assert "train.batch_size: 0 must" in message[0]
    assert "'qlorra' is not allowed" in message[1]


def test_mistake_in_an_inherited_axis_names_its_file(tmp_path):
    (tmp_path / "base.yaml").write_text(f"{MODEL}sweep:\n  axes:\n    train.batch_size: [0]\n")
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\n")
    with pytest.raises(SpecError, match=r"base\.yaml:4: sweep\.axes: train\.batch_size: 0 must be"):
        cells(tmp_path / "mine.yaml", ())


# --- maximum number of cells -----------------------------------------------------------------------------------------


def test_too_many_cells_are_an_error(problems):
    seeds, batches = ",".join(map(str, range(500))), ",".join(map(str, range(1, 302)))
    assert problems("", f"train.seed={seeds}", f"train.batch_size={batches}") == [
        "the sweep has 150,500 cells; at most 100,000 are planned at once: split it"
    ]
