"""YAML that users write: plain values, clear errors with a line, and no code execution."""

import pytest

from ftbench.errors import SpecError
from ftbench.spec.reading import MAX_BYTES, line_of, parse_value, read_yaml


@pytest.fixture
def spec(tmp_path):
    """Return a function that writes a spec file and returns its path."""

    def write(content):
        path = tmp_path / "spec.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def error_of(path):
    with pytest.raises(SpecError) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("model: a/b\ntrain: {x: 2, y: 2.0e-4}\n", {"model": "a/b", "train": {"x": 2, "y": 2e-4}}),
        ("list: [1, on, null, off]\n", {"list": [1, True, None, False]}),
        (b"\xef\xbb\xbfmodel: a\n", {"model": "a"}),  # byte order mark
        ("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: *a\n", {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3},
                                                            "c": {"x": 1, "y": 2}}),
        ("on: 1\n2: 2\nnull: 3\n", {"on": 1, "2": 2, "null": 3}),
    ],
)  # fmt: skip
def test_read_yaml_returns_plain_values_with_text_keys(spec, content, expected):
    assert read_yaml(spec(content)) == expected


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_empty_file_is_refused_with_what_a_spec_needs(spec, text):
    assert "the file is empty; a spec needs at least `model:`" in error_of(spec(text))


def test_large_file_is_refused(tmp_path):
    path = tmp_path / "giant.yaml"
    with path.open("wb") as file:
        file.truncate(10**9)  # sparse
    assert f"too large: at most {MAX_BYTES:,} bytes" in error_of(path)


def test_data_file_in_the_place_of_a_spec_is_named_as_such(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n" * MAX_BYTES)
    assert f"{path}: a data file, not a spec: write MODEL --dataset FILE" in error_of(path)


@pytest.mark.parametrize(
    ("content", "line", "said"),
    [
        ("model: a\nname: 実験\n".encode("shift-jis"), 2, "not UTF-8"),
        (b"model: a\nname: b\x00c\n", 2, "special characters"),
        ("model: a\nname: x\nmodel: b\n", 3, "duplicate key 'model'"),
        ("model: a\ntrain:\n  seed: 1\n  seed: 2\n", 4, "duplicate key 'seed'"),
        ("model: a\ntrain: {batch_size: 2\n", 3, "not valid YAML"),
        ("model: a\n\tname: b\n", 2, "not valid YAML"),
        ("model: *nowhere\n", 1, "not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        ("model: a\nname: " + "9" * 5000, 2, "cannot be read as int"),
        ("model: a\nname: !!bool maybe", 2, "cannot be read as bool"),
        ("model: a\nname: !!binary é", 2, "only plain values are"),
        ("model: a\nname: !Ref x", 2, "only plain values are"),
    ],
)
def test_error_names_the_line(spec, content, line, said):
    path = spec(content)
    message = error_of(path)
    assert f"{path}:{line}: " in message
    assert said in message
    assert len(message) < 400


def test_python_tags_are_refused_and_not_executed(spec, tmp_path):
    message = error_of(spec(f"model: a\nname: !!python/object/apply:os.system ['touch {tmp_path / 'run'}']\n"))
    assert "only plain values are" in message
    assert not (tmp_path / "run").exists()


def test_line_of_finds_a_key_or_its_section(spec):
    path = spec("model: a\n\ntrain:\n  # why\n  batch_size: 2\n  seed: 1\n")
    assert [line_of(path, key) for key in (["model"], ["train"], ["train", "seed"])] == [1, 3, 6]
    assert line_of(path, ["train", "epochs"]) == 3
    assert line_of(path, ["dataset"]) is None
    assert line_of(path.with_name("absent.yaml"), ["train"]) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("2e-4", 2e-4),
        ("off", False),
        ("", None),
        ("[q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("{a: 1}", {"a": 1}),
        *((text, text) for text in (
            "Qwen/Qwen3-8B", "a: b: c", "[1, 2", "!!python/object/apply:os.system [id]", "2024-13-45", "2024-01-02",
            "1:30", "017", "{a: 1, a: 2}", "\x00",
        )),
    ],
)  # fmt: skip
def test_parse_value_returns_yaml_or_the_text(text, value):
    assert parse_value(text) == value
