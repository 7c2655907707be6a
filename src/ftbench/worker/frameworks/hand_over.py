"""The first half of a run in another framework, in ftbench's own interpreter: weights are made, data are tokenised once
and in order, and the framework's interpreter takes this process over."""

import json
import os
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict

from ftbench.spec.frameworks import interpreter
from ftbench.store.rundir import write_json
from ftbench.worker import frameworks
from ftbench.worker.data.tokens import Row
from ftbench.worker.frameworks import entry
from ftbench.worker.model import loading
from ftbench.worker.train import prepared
from ftbench.worker.training_run import TrainingRun

TOKENIZER = "tokenizer_config.json"


def train(run: TrainingRun) -> None:
    """Write data/ and the framework's configuration, and become its interpreter: the process stays the same, so that it
    is watched, ended and accounted for as one. Does not return."""
    spec, directory = run.spec, run.directory
    run.phases.enter("make_weights")
    source = loading.source_of(spec.model, spec.method)
    run.phases.enter("prepare_data")
    _, data = prepared(spec, source)
    write_rows(directory.path / frameworks.DATA, data.train, spec.launch.framework == "ms-swift")
    model = str(source)
    if Path(model).is_dir():
        write_model(directory.path / frameworks.MODEL, Path(model))
        model = frameworks.MODEL
    run.write_facts(dataset=data.description, warnings=data.warnings)
    framework = frameworks.load(spec.launch.framework)
    best = framework.best(spec) if spec.launch.settings == "best" else {}
    write_json(directory.framework, framework.configuration(spec, model) | best)
    run.phases.enter("import")
    python = interpreter(spec.launch)
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    os.execve(python, [python, str(Path(entry.__file__)), str(directory.path.resolve())], own)


def write_rows(folder: Path, rows: list[Row], with_lengths: bool = False) -> None:
    """Save the rows as `datasets` and frameworks on top of it read them; `with_lengths` for ms-swift, which leaves out
    what is too long by them and packs by them, while axolotl's packing stumbles over them."""
    samples = [sample for row in rows for sample in row]
    columns = {
        "input_ids": [list(map(int, sample.ids)) for sample in samples],
        "attention_mask": [[1] * len(sample.ids) for sample in samples],
        "labels": [list(map(int, sample.labels)) for sample in samples],
        **({"lengths": [[len(sample.ids)] for sample in samples]} if with_lengths else {}),
    }
    DatasetDict({"train": Dataset.from_dict(columns)}).save_to_disk(str(folder))


def write_model(folder: Path, source: Path) -> None:
    """Write a model directory that older versions of transformers read as well: links to the files of `source`, its
    configuration and the tokenizer's in words that they know."""
    folder.mkdir(parents=True)
    for file in source.resolve().iterdir():
        if file.name not in ("config.json", TOKENIZER):
            (folder / file.name).symlink_to(file)
    write_json(folder / "config.json", with_older_words(json.loads((source / "config.json").read_text())))
    if (source / TOKENIZER).exists():
        tokenizer = json.loads((source / TOKENIZER).read_text())
        if tokenizer.get("tokenizer_class") == "TokenizersBackend":  # transformers 5 writes it, 4 does not know it
            tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
        write_json(folder / TOKENIZER, tokenizer)


def with_older_words(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with what transformers 4 calls otherwise beside what transformers 5 wrote: it would take
    its own default for a base of the rotations that it does not find, and say nothing."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return config
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    return config | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling, "torch_dtype": config.get("dtype")}
