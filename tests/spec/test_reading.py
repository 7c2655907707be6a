import os

import pytest

from ftbench.errors import SpecError
from ftbench.spec.reading import MAX_BYTES, line_of, parse_value, read_yaml

# An alias bomb that is written out takes for ever; a refusal takes milliseconds.
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def spec(tmp_path):
    """Writes a spec file and returns its path."""

    def write(content):
        path = tmp_path / "spec.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def refusal(path):
    with pytest.raises(SpecError) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_plain_values_are_read(spec):
    path = spec("model: a/b\ntrain: {batch_size: 2, learning_rate: 2.0e-4}\nlist: [1, on, null]\n")
    assert read_yaml(path) == {
        "model": "a/b",
        "train": {"batch_size": 2, "learning_rate": 2e-4},
        "list": [1, True, None],
    }


def test_a_byte_order_mark_is_no_part_of_the_text(spec):
    assert read_yaml(spec(b"\xef\xbb\xbfmodel: a\n")) == {"model": "a"}


def test_aliases_and_merge_keys_work(spec):
    assert read_yaml(spec("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: *a\n")) == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": {"x": 1, "y": 2},
    }


def test_overriding_a_merged_key_is_not_writing_it_twice(spec):
    data = read_yaml(spec("a: {b: &b {<<: {x: 1}, x: 2}}\nc: {<<: *b, y: 1}\n"))
    assert data == {"a": {"b": {"x": 2}}, "c": {"x": 2, "y": 1}}


def test_keys_are_the_text_that_they_are_written_as(spec):
    assert read_yaml(spec("on: 1\n2: 2\nnull: 3\n")) == {"on": 1, "2": 2, "null": 3}


def test_a_missing_file_suggests_the_nearest_there_is(spec):
    path = spec("model: a\n")
    assert refusal(path.with_name("spce.yaml")).endswith("no such file; did you mean spec.yaml?")


def test_a_missing_folder_is_named(tmp_path):
    assert f"the folder {tmp_path / 'gone'} does not exist" in refusal(tmp_path / "gone" / "spec.yaml")


def test_a_directory_is_no_spec(tmp_path):
    assert "is a directory" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n"])
def test_an_empty_file_says_what_a_spec_needs(spec, text):
    message = refusal(spec(text))
    assert "empty" in message or "nothing" in message
    assert "model:" in message


def test_a_giant_is_refused_by_its_size(tmp_path):
    path = tmp_path / "giant.yaml"
    with path.open("wb") as file:
        file.truncate(10**9)  # sparse: takes no room
    assert "1,000,000,000 bytes is no spec" in refusal(path)


def test_the_densest_file_that_is_read_is_refused_in_time(spec):
    assert "values" in refusal(spec("a: [" + "[]," * ((MAX_BYTES - 10) // 3) + "]"))


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no /dev/zero")
def test_a_device_without_end_is_refused():
    from pathlib import Path

    assert "is a pipe or a device" in refusal(Path("/dev/zero"))


def test_a_pipe_that_nobody_writes_to_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe or a device" in refusal(tmp_path / "pipe")


def test_a_link_to_itself_cannot_be_read(tmp_path):
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    assert "cannot be read" in refusal(tmp_path / "loop.yaml")


def test_text_that_is_not_utf8_is_told_with_its_line(spec):
    path = spec("model: a\nname: 実験\n".encode("shift-jis"))
    assert f"{path}:2: " in refusal(path)
    assert "not UTF-8" in refusal(path)


def test_a_binary_is_no_text(spec):
    assert "not UTF-8" in refusal(spec(b"\x7fELF\x02\x01\x01\x00" + bytes(range(256))))


def test_control_characters_are_told_with_their_line(spec):
    path = spec(b"model: a\nname: b\x00c\n")
    assert f"{path}:2: " in refusal(path)


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:os.system ['touch {}']",
        "!!python/name:os.system",
        "!!python/object/new:os.system ['touch {}']",
        "!!python/module:os",
        "!Ref x",
    ],
)
def test_tags_are_refused_and_nothing_is_run(spec, tmp_path, tag):
    path = spec(f"model: a\nname: {tag.format(tmp_path / 'run')}\n")
    assert f"{path}:2: " in refusal(path)
    assert "is a tag; specs hold plain values only" in refusal(path)
    assert not (tmp_path / "run").exists()


def test_an_alias_bomb_is_refused_before_it_goes_off(spec):
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "aliases" in refusal(spec("\n".join(levels)))


def test_a_bomb_of_merge_keys_is_refused(spec):
    levels = ["a0: &a0 {" + ", ".join(f"k{i}: 1" for i in range(9)) + "}"]
    levels += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12)]
    assert "aliases" in refusal(spec("\n".join(levels)))


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", "&a [*a]", "a: &a {<<: *a}"])
def test_an_alias_that_holds_itself_is_refused(spec, text):
    assert "holds itself" in refusal(spec(text))


@pytest.mark.parametrize(
    "brackets", ["[" * 60_000, "[" * 900 + "]" * 900, "{a: " * 10_000, "- " * 30_000, "[" * 100_000]
)
def test_deep_nesting_is_refused(spec, brackets):
    message = refusal(spec(brackets))
    assert "nested too deeply" in message or "bytes is no spec" in message


@pytest.mark.parametrize("text", ["model: a\nname: x\nmodel: b\n", "{model: a,\nname: x,\nmodel: b}"])
def test_a_key_written_twice_is_told_with_its_second_line(spec, text):
    path = spec(text)
    assert f"{path}:3: " in refusal(path)
    assert "the key 'model' stands twice" in refusal(path)


def test_a_key_written_twice_further_in_is_found_too(spec):
    path = spec("model: a\ntrain:\n  seed: 1\n  seed: 2\n")
    assert f"{path}:4: " in refusal(path)


@pytest.mark.parametrize(
    ("text", "kind"), [("- model: a\n", "a list"), ("model\n", "a text"), ("7\n", "a int"), ("~", "nothing")]
)
def test_anything_but_a_mapping_is_refused(spec, text, kind):
    assert f"not {kind}" in refusal(spec(text))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model: a\ntrain: {batch_size: 2\n", 3),
        ("model: a\n\tname: b\n", 2),
        ("model: a\nname: 'b\n", 3),
        ("model: a\n- b\n", 2),
        ("model: a\n? [x]\n: 1\n", 2),
        ("model: *nowhere\n", 1),
        ("a: 1\n---\nb: 2\n", 2),
    ],
)
def test_what_is_no_yaml_is_told_with_its_line(spec, text, line):
    path = spec(text)
    assert f"{path}:{line}: " in refusal(path)


@pytest.mark.parametrize(
    "value",
    [
        "2024-13-45",
        "9" * 5000,
        "!!float ''",
        "!!int ''",
        "!!int x",
        "!!bool maybe",
        "!!timestamp x",
        "!!binary é",
        "!!omap [a: 1]",
        "!!pairs [a: 1]",
    ],
)
def test_a_value_that_does_not_fit_its_type_is_told_with_its_line(spec, value):
    path = spec(f"model: a\nname: {value}\n")
    message = refusal(path)
    assert f"{path}:2: " in message
    assert len(message) < 400


def test_the_line_of_a_key_is_found_at_any_depth(spec):
    path = spec("model: a\n\ntrain:\n  # why\n  batch_size: 2\n  seed: 1\n")
    assert [line_of(path, key) for key in (["model"], ["train"], ["train", "seed"])] == [1, 3, 6]


def test_the_line_of_an_absent_key_is_that_of_its_section(spec):
    path = spec("model: a\ntrain:\n  seed: 1\n")
    assert line_of(path, ["train", "epochs"]) == 2
    assert line_of(path, ["dataset"]) is None
    assert line_of(path.with_name("absent.yaml"), ["train"]) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("2e-4", "2e-4"),
        ("2.0e-4", 2e-4),
        ("off", False),
        ("", None),
        ("[q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("{a: 1}", {"a": 1}),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("a: b: c", "a: b: c"),
        ("[1, 2", "[1, 2"),
        ("!!python/object/apply:os.system [id]", "!!python/object/apply:os.system [id]"),
        ("2024-13-45", "2024-13-45"),
        ("{a: 1, a: 2}", "{a: 1, a: 2}"),
        ("\x00", "\x00"),
    ],
)
def test_a_value_of_set_is_yaml_or_else_text(text, value):
    assert parse_value(text) == value
