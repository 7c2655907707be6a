import os
import re
from pathlib import Path

import pytest

from ftbench.spec.datasets import Dataset
from ftbench.spec.experiment import Experiment
from ftbench.spec.identity import fingerprint, slug
from ftbench.store.rundir import find_runs, first_gpu, read_json

RESULTS = Path(__file__).resolve().parents[2] / "results" / "h200"


def spec(**sections):
    sections.setdefault("model", {"id": "tiny/qwen3", "weights": "random"})
    return Experiment.model_validate({"name": "a", "method": {"name": "lora"}, **sections})


SAME = [
    {"name": "b"},
    {"launch": {"timeout_s": 60}},
    {"measure": {"warmup": 3}},
    {"measure": {"save_adapter": True}},
]


@pytest.mark.parametrize("sections", SAME, ids=str)
def test_what_does_not_change_the_result_does_not_change_the_fingerprint(sections):
    assert fingerprint(spec(**sections)) == fingerprint(spec())


OTHER = [
    {"train": {"batch_size": 8}},
    {"train": {"seed": 1}},
    {"train": {"learning_rate": 1e-3}},
    {"method": {"name": "qlora"}},
    {"method": {"name": "lora", "rank": 16}},
    {"dataset": {"name": "alpaca"}},
    {"dataset": {"max_length": 128}},
    {"model": {"id": "tiny/llama", "weights": "random"}},
    {"optimizations": {"compile": True}},
    {"optimizations": {"fp8": "rowwise"}},
]


@pytest.mark.parametrize("sections", OTHER, ids=str)
def test_what_changes_the_result_changes_the_fingerprint(sections):
    assert fingerprint(spec(**sections)) != fingerprint(spec())


@pytest.mark.parametrize(
    "change",
    [{"gpus": 2}, {"strategy": "zero3"}, {"offload": "params"}, {"framework": "axolotl"}, {"settings": "best"}],
)
def test_how_many_gpus_share_a_run_and_how_changes_the_result(change):
    """What cannot be launched yet is refused as a whole, so the section is changed under a spec that passed."""
    plain = spec()
    changed = plain.model_copy(update={"launch": plain.launch.model_copy(update=change)})
    assert fingerprint(changed) != fingerprint(plain)


def test_committed_runs_keep_their_identity():
    runs = [run for run in find_runs(RESULTS) if len(run.run_id.split("-")[-2]) == 12]  # eight digits: an older hash
    for run in runs:
        values = read_json(run.spec_json)
        resolved = Experiment.model_validate({key: values[key] for key in Experiment.model_fields if key in values})
        if resolved.model.path:  # a file's content counts, and this one lay on the machine that trained
            continue
        gpu = first_gpu(read_json(run.machine))["name"]
        assert run.run_id.startswith(slug(resolved, gpu))
    assert len(runs) > 100


def test_all_of_these_are_different_experiments():
    assert len({fingerprint(spec(**sections)) for sections in OTHER}) == len(OTHER)


@pytest.mark.parametrize("part", ["dataset", "model"])
def test_the_same_files_elsewhere_are_the_same_experiment(part):
    def at(path):
        section = {"name": "file"} if part == "dataset" else {"id": "a/b"}
        return fingerprint(spec(**{part: section | {"path": path}}))

    assert at("/home/me/data.jsonl") == at("/mnt/data.jsonl")
    assert at("/home/me/data.jsonl") != at("/home/me/other.jsonl")


@pytest.fixture
def at(tmp_path):
    """The fingerprint of a spec whose data file, or model's directory or config.json, is written so."""

    def write(part, path, content):
        path = tmp_path / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        section = {"dataset": {"name": "file"}, "model": {"id": "a/b"}, "directory": {"id": "a/b"}}[part]
        named = path.parent if part == "directory" else path
        return fingerprint(spec(**{part.replace("directory", "model"): section | {"path": str(named)}}))

    return write


PARTS = [("dataset", "data.jsonl"), ("model", "config.json"), ("directory", "model/config.json")]


@pytest.mark.parametrize(("part", "name"), PARTS)
def test_the_same_file_in_another_folder_is_the_same_experiment(at, part, name):
    assert at(part, f"here/{name}", b'{"a": 1}') == at(part, f"there/deeper/{name}", b'{"a": 1}')


@pytest.mark.parametrize(("part", "name"), PARTS)
@pytest.mark.parametrize("edited", [b'{"a": 2}', b'{"a": 1}\n', b""], ids=["same size", "longer", "empty"])
def test_an_edited_file_is_another_experiment(at, part, name, edited):
    before = at(part, name, b'{"a": 1}')
    assert at(part, name, edited) != before
    assert at(part, name, b'{"a": 1}') == before


@pytest.mark.parametrize("name", [
    "chat_template.jinja", "tokenizer.json", "tokenizer.model", "preprocessor_config.json",
    "model-00001-of-00002.safetensors",
])  # fmt: skip
def test_a_model_of_another_template_tokenizer_or_weights_is_another_experiment(tmp_path, name):
    """But where weights are made and tokens with them: only the shape is read then."""
    (tmp_path / "config.json").write_text("{}")

    def of(weights):
        return fingerprint(spec(model={"id": "a/b", "path": str(tmp_path), "weights": weights}))

    seen, shapes = {of("pretrained")}, {of("random")}
    for content in ("one", "two"):
        (tmp_path / name).write_text(content)
        seen, shapes = seen | {of("pretrained")}, shapes | {of("random")}
    assert (len(seen), len(shapes)) == (3, 1)


@pytest.mark.parametrize("name", ["pipe", "\ud800"])
def test_what_is_no_file_is_known_by_its_name_alone(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    assert fingerprint(spec(model={"id": "a/b", "path": str(tmp_path / name)}))


@pytest.mark.parametrize("place", [0, 3_000_000 - 1], ids=["begin", "end"])
def test_an_edit_at_either_end_of_a_large_file_is_seen(at, place):
    content = bytearray(b"x" * 3_000_000)
    before = at("dataset", "data.jsonl", content)
    content[place : place + 1] = b"y"
    assert at("dataset", "data.jsonl", content) != before


@pytest.mark.parametrize("end", [b"x" * 3_000_000, b"x" * 10], ids=["large", "small"])
def test_a_row_added_to_a_file_is_seen(at, end):
    assert at("dataset", "data.jsonl", end) != at("dataset", "data.jsonl", end + b"x")


def test_a_file_of_another_name_is_another_experiment(at):
    assert at("dataset", "data.jsonl", b"{}") != at("dataset", "other.jsonl", b"{}")


def test_the_order_of_keys_and_written_defaults_do_not_matter():
    assert fingerprint(spec(train={"seed": 42, "batch_size": 2})) == fingerprint(spec(train={"batch_size": 2}))
    assert fingerprint(spec(train={"batch_size": 2, "seed": 7})) == fingerprint(
        spec(train={"seed": 7, "batch_size": 2})
    )


def test_a_slug_says_model_method_and_batch():
    sections = {"model": {"id": "Qwen/Qwen3-8B"}, "method": {"name": "qlora"}, "train": {"batch_size": 4}}
    assert re.fullmatch(r"qwen3-8b-qlora-b4-[0-9a-f]{12}", slug(spec(**sections)))


@pytest.mark.parametrize("name", ["../../etc/passwd", "a b;rm -rf *", "日本語", "x" * 500, ".hidden", "/", "-"])
def test_a_slug_is_safe_as_a_file_name_whatever_the_model_is_called(name):
    found = slug(spec(model={"id": name}))
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,99}", found)


def test_equal_data_sets_are_one_key_of_a_table():
    names = {"image": "photo", "answer": "finding"}
    first, second = (Dataset(name="file", path="scans.jsonl", columns=dict(names)) for _ in range(2))
    assert {first: 1}[second] == 1
