import re
from pathlib import Path

import pytest

from ftbench.spec.experiment import CONTROLS, Experiment
from ftbench.spec.identity import _relevant, fingerprint, slug
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


def test_ignored_keys_keep_the_fingerprint():
    assert {fingerprint(spec(**sections)) for sections in SAME} == {fingerprint(spec())}


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
    {"optimizations": {"fp8": "tensorwise"}},
]


LAUNCH = [{"gpus": 2}, {"strategy": "zero3"}, {"offload": "params"}, {"framework": "axolotl"}, {"settings": "best"}]


def test_other_keys_change_the_fingerprint():
    """Change `launch` after validation, because some values are impossible with the rest."""
    plain = spec()
    launches = [plain.model_copy(update={"launch": plain.launch.model_copy(update=change)}) for change in LAUNCH]
    specs = [plain, *(spec(**sections) for sections in OTHER), *launches]
    assert len({fingerprint(each) for each in specs}) == len(specs)


def test_committed_runs_keep_their_fingerprint():
    """One run of each fingerprint is enough."""
    runs = [run for run in find_runs(RESULTS) if len(run.run_id.split("-")[-2]) == 12]  # eight digits: an older hash
    for run in {run.run_id.rpartition("-")[0]: run for run in runs}.values():
        values = read_json(run.spec_json)
        if values["measure"].get("control", "off") not in ("off", *CONTROLS):  # broken on purpose, in a former way
            continue
        resolved = Experiment.model_validate({key: values[key] for key in Experiment.model_fields if key in values})
        if resolved.model.path:  # its content counts, and the file is not here
            continue
        gpu = first_gpu(read_json(run.machine))["name"]
        own_batches = resolved.method.name == "unsloth" and not resolved.optimizations.packing
        padded_then = own_batches and "padded" not in values["method"]
        assert run.run_id.startswith(slug(resolved, gpu)) is not padded_then
    assert len(runs) > 100


def test_unsloth_with_its_own_batches_differs_from_older_runs_with_padded_ones():
    """Packed and padded batches are as before."""

    def digest(optimizations=None, **method):
        made = spec(method={"name": "unsloth", **method}, optimizations=optimizations or {})
        return _relevant(made)["method"]

    assert digest() == {"name": "unsloth", "padded": False}
    assert digest(padded=True) == {"name": "unsloth", "padded": True}
    assert digest({"packing": True}) == digest({"padding_free": True}) == {"name": "unsloth"}


@pytest.mark.parametrize("part", ["dataset", "model"])
def test_path_of_a_missing_file_does_not_count(part):
    def at(path):
        section = {"name": "file"} if part == "dataset" else {"id": "a/b"}
        return fingerprint(spec(**{part: section | {"path": path}}))

    assert at("/home/me/data.jsonl") == at("/mnt/data.jsonl")
    assert at("/home/me/data.jsonl") != at("/home/me/other.jsonl")


@pytest.fixture
def at(tmp_path):
    """Return a function for the fingerprint of a spec with a data file or a model directory."""

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
def test_folder_of_a_file_does_not_count(at, part, name):
    assert at(part, f"here/{name}", b'{"a": 1}') == at(part, f"there/deeper/{name}", b'{"a": 1}')


@pytest.mark.parametrize(("part", "name"), PARTS)
def test_content_of_a_file_counts(at, part, name):
    before = at(part, name, b'{"a": 1}')
    assert at(part, name, b'{"a": 2}') != before
    assert at(part, name, b'{"a": 1}') == before


@pytest.mark.parametrize("name", [
    "chat_template.jinja", "tokenizer.json", "tokenizer.model", "preprocessor_config.json",
    "model-00001-of-00002.safetensors",
])  # fmt: skip
def test_tokenizer_and_weights_of_a_model_count(tmp_path, name):
    """With random weights only the shape counts."""
    (tmp_path / "config.json").write_text("{}")

    def of(weights):
        return fingerprint(spec(model={"id": "a/b", "path": str(tmp_path), "weights": weights}))

    seen, shapes = {of("pretrained")}, {of("random")}
    for content in ("one", "two"):
        (tmp_path / name).write_text(content)
        seen, shapes = seen | {of("pretrained")}, shapes | {of("random")}
    assert (len(seen), len(shapes)) == (3, 1)


def test_slug_has_model_method_and_batch():
    sections = {"model": {"id": "Qwen/Qwen3-8B"}, "method": {"name": "qlora"}, "train": {"batch_size": 4}}
    assert re.fullmatch(r"qwen3-8b-qlora-b4-[0-9a-f]{12}", slug(spec(**sections)))


@pytest.mark.parametrize("name", ["../../etc/passwd", "a b;rm -rf *", "日本語", "x" * 500])
def test_slug_is_a_safe_file_name(name):
    found = slug(spec(model={"id": name}))
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,99}", found)


def test_edited_file_in_a_data_folder_changes_the_fingerprint(tmp_path):
    folders = [tmp_path / name / "data" for name in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "x.jsonl").write_text('{"text": "one"}\n')
    one, two = (spec(dataset={"name": "file", "path": str(folder)}) for folder in folders)
    assert fingerprint(one) == fingerprint(two)
    (folders[1] / "x.jsonl").write_text('{"text": "two"}\n')
    assert fingerprint(one) != fingerprint(two)
