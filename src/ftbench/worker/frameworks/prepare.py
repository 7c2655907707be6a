"""First part of a run with another framework, in ftbench's interpreter: create random weights (if requested), tokenize
the data, and replace this process by the framework's interpreter."""

import json
import os
import time
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict

from ftbench.spec.frameworks import interpreter
from ftbench.store.rundir import write_json
from ftbench.worker import frameworks, parallel
from ftbench.worker.data.tokens import Row
from ftbench.worker.frameworks import entry
from ftbench.worker.model import loading
from ftbench.worker.train import prepared
from ftbench.worker.training_run import TrainingRun

TOKENIZER = "tokenizer_config.json"
_POLL_S = 0.1


def train(run: TrainingRun) -> None:
    """Write data/ and the framework's configuration, and replace this process by the framework's interpreter.

    The process id does not change, so ftbench can still watch and stop the process. This function does not return.
    """
    if parallel.is_first():
        _write_inputs(run)
    else:
        while not run.directory.framework.exists():  # if the first rank fails, ftbench stops all ranks
            time.sleep(_POLL_S)
    run.phases.enter("import")
    python = interpreter(run.spec.launch)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    os.execve(python, [python, str(Path(entry.__file__)), str(run.directory.path.resolve())], environment)


def _write_inputs(run: TrainingRun) -> None:
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


def write_rows(folder: Path, rows: list[Row], with_lengths: bool = False) -> None:
    """Save the rows for the `datasets` library. If `with_lengths` is True, add a column of lengths. ms-swift needs this
    column to filter and pack. axolotl's packing fails with this column."""
    samples = [sample for row in rows for sample in row]
    columns = {
        "input_ids": [list(map(int, sample.ids)) for sample in samples],
        "attention_mask": [[1] * len(sample.ids) for sample in samples],
        "labels": [list(map(int, sample.labels)) for sample in samples],
        **({"lengths": [[len(sample.ids)] for sample in samples]} if with_lengths else {}),
    }
    DatasetDict({"train": Dataset.from_dict(columns)}).save_to_disk(str(folder))


def write_model(folder: Path, source: Path) -> None:
    """Write a model directory that transformers 4 can read. Convert the configuration and the tokenizer settings of
    `source`, and link the other files."""
    folder.mkdir(parents=True)
    for file in source.resolve().iterdir():
        if file.name not in ("config.json", TOKENIZER):
            (folder / file.name).symlink_to(file)
    write_json(folder / "config.json", for_transformers_4(json.loads((source / "config.json").read_text())))
    if (source / TOKENIZER).exists():
        tokenizer = json.loads((source / TOKENIZER).read_text())
        if tokenizer.get("tokenizer_class") == "TokenizersBackend":  # transformers 5 writes this name
            tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
        write_json(folder / TOKENIZER, tokenizer)


def for_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with additional keys for transformers 4. Without the key `rope_theta`, transformers 4
    would silently use a default value."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return config
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    return config | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling, "torch_dtype": config.get("dtype")}
