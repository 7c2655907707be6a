"""Published files: JSON schemas, the commands of the regression gate, the Dockerfile."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from ftbench.store.models import check, model_of

ROOT = Path(__file__).parents[1]
SCHEMAS = ROOT / "docs" / "reference" / "schemas"
RUNS = ROOT / "results" / "h200"


def schema_of(path: Path) -> Path:
    name = path.stem if (SCHEMAS / f"{path.stem}.schema.json").is_file() else path.parent.name
    return SCHEMAS / f"{name}.schema.json"


@pytest.mark.parametrize("folder", ["profiles", "study/qwen3-8b-lora"])
def test_committed_runs_match_the_schemas(folder):
    jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")
    files = [path for path in sorted((RUNS / folder).rglob("*.json"))[:40] if schema_of(path).is_file()]
    assert len({path.name for path in files}) >= 5
    for path in files:
        schema = json.loads(schema_of(path).read_text())
        jsonschema.Draft202012Validator(schema).validate(json.loads(path.read_text()))


@pytest.mark.parametrize(("name", "document"), [
    ("summary.json", {"name": 1}), ("summary.json", {"warnings": "none"}),
    ("applied.json", {"optimizer": {"state": {"exp_avg": "x"}}}), ("spec.json", {"train": {"batch_size": 1.5}}),
    ("spec.json", {"launch": {"gpus": 2000}}), ("summary.json", {"ranks": {"token_skew": 0.1}}),
])  # fmt: skip
def test_rejected_files_do_not_match_the_schema(name, document):
    jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")
    schema = json.loads((SCHEMAS / name.replace(".json", ".schema.json")).read_text())
    with pytest.raises(ValueError, match=": "):
        check(document, model_of(Path(name)))
    assert not jsonschema.Draft202012Validator(schema).is_valid(document)


def test_documented_gate_commands_run(ftbench, tmp_path, monkeypatch):
    """Run each line with `ftbench` on existing runs, with a bundle made as documented."""
    page = (ROOT / "docs" / "how-to" / "ci-gate.md").read_text()
    (workflow,) = re.findall(r"```yml\n(.*?)```", page, re.DOTALL)
    steps = yaml.safe_load(workflow)["jobs"]["gate"]["steps"]
    lines = [step["run"].partition(" >>")[0] for step in steps if step.get("run", "").startswith("ftbench")]
    assert len(lines) == 4
    shutil.copytree(RUNS / "launch-bound", tmp_path / "new")
    monkeypatch.chdir(tmp_path)
    assert ftbench("bundle", "new", "-o", "trusted.tar.zst")[0] == 0
    for line in lines:
        if not line.startswith("ftbench sweep"):
            assert ftbench(*shlex.split(line)[1:])[0] == 0, line
    assert (tmp_path / "gate.html").is_file()


def test_dockerfile_uses_existing_files():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    (command,) = (json.loads(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD "))
    assert all((ROOT / name).exists() for name in copied)
    assert command[0] == "sweep"
    assert command[1].split("/")[0] in copied
    assert (ROOT / command[1]).is_file()
