"""`measure.generate`: prompts from files or in place, and what may stand there."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftbench.errors import SpecError
from ftbench.report.data.facts import _matters
from ftbench.spec.experiment import Experiment
from ftbench.spec.identity import fingerprint
from ftbench.spec.load import load

PROMPTS = Path(__file__).resolve().parents[2] / "configs" / "prompts"


@pytest.fixture
def read(tmp_path):
    def of(value, *sets, **files):
        (tmp_path / "sub").mkdir(exist_ok=True)
        for name, text in files.items():
            (tmp_path / "sub" / f"{name}.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        spec = tmp_path / "sub" / "spec.yaml"
        spec.write_text(f"model: tiny/qwen3\nmeasure: {{generate: {value}}}\n", "utf-8")
        return load(spec, sets).measure.generate

    return of


FILE = "prompts: [{id: f, prompt: 京都は。}]\ntemperature: 0.1\n"


def test_prompt_file_is_relative_to_the_spec(read):
    asked = read("x.yaml", x=FILE)
    assert [(prompt.id, prompt.prompt) for prompt in asked.prompts] == [("f", "京都は。")]
    assert (asked.temperature, asked.top_k, asked.top_p, asked.max_new_tokens) == (0.1, 50, 0.95, 1024)
    spec = Experiment.model_validate({"name": "a", "model": {"id": "a/b"}, "measure": {"generate": asked}})
    assert Experiment.model_validate(spec.model_dump(mode="json")) == spec


def test_precedence_of_prompt_file_spec_and_set(read):
    assert read("{prompts: x.yaml, temperature: 0.5}", x=FILE).temperature == 0.5
    asked = read("[x.yaml, {id: q, prompt: hi}]", "measure.generate.temperature=0.9", x=FILE)
    assert asked.temperature == 0.9
    assert [prompt.id for prompt in asked.prompts] == ["f", "q"]
    assert read("x.yaml", "measure.generate=off", x=FILE) is None
    assert read("off") is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("on", "must be off, a YAML file with prompts"),
        ("7", "must be off, a YAML file with prompts"),
        ("none.yaml", "none.yaml: no such file"),
        (".", "cannot be read (Is a directory)"),
        ("bytes.yaml", "not UTF-8: save the file as UTF-8 text"),
        ("empty.yaml", "the file is empty; a prompt file needs `prompts:`"),
        ("other.yaml", "needs `prompts`, a list of {id, prompt}"),
        ("[]", "must be a list of 1 to 32 prompts"),
        ("{}", "measure.generate.prompts: is missing"),
        ("[3]", "'3' is not a prompt: write {id: a name, prompt: the question}"),
        ("[{id: a}]", "is not a prompt"),
        ("[{id: a, prompt: ' '}]", "is empty: write a question"),
        ("[{id: a, prompt: x}, {id: a, prompt: y}]", "two prompts are named a"),
        ("{prompts: [{id: a, prompt: b}], temprature: 1}", "did you mean temperature?"),
        ("{prompts: [{id: a, prompt: b}], temperature: 0}", "measure.generate.temperature: 0: must be greater than 0"),
        ("{prompts: [{id: a, prompt: b}], max_new_tokens: 1.0e+9}", "measure.generate.max_new_tokens"),
        ("{prompts: [{id: a, prompt: b}], top_p: .nan}", "measure.generate.top_p"),
    ],
)
def test_invalid_prompts_are_errors(read, value, message):
    with pytest.raises(SpecError) as caught:
        read(value, bytes=b"\xff\xfe", empty="", other="foo: 1\n")
    assert message in str(caught.value)


def test_prompts_keep_the_fingerprint():
    def spec(**measure):
        return Experiment.model_validate({"name": "a", "model": {"id": "a/b"}, "measure": measure})

    asked = {"prompts": [{"id": "a", "prompt": "b"}]}
    assert fingerprint(spec(generate=asked)) == fingerprint(spec())
    assert not _matters("measure.generate")
    assert not _matters("measure.generate.top_k")


@pytest.mark.parametrize("name", ["ja", "en"])
def test_shipped_prompt_files_have_three_prompts(read, name):
    assert len(read(str(PROMPTS / f"{name}.yaml")).prompts) == 3
