"""Open a data set from the hub, from a file, or from the sample data set of ftbench.

`python -m ftbench.worker.data.sources SPEC OUT MOST [pairs]` exports rows of a hub data set to a file. The parent
process uses this command, because it does not import `datasets`.
"""

import json
import sys
from pathlib import Path
from typing import Any

from ftbench.core.data_files import FileRows, read_file
from ftbench.core.data_formats import Example, with_markers
from ftbench.errors import DataError, FtbenchError, MissingError
from ftbench.facts import SAMPLE
from ftbench.spec.datasets import Dataset, row_example, row_format


class HubRows:
    """Rows of a hub data set, read on demand. Images stay encoded. A class label is a name, not a number."""

    folder = None  # relative paths are not possible

    def __init__(self, name: str, data: Any) -> None:
        from datasets import ClassLabel, Image, List

        stored = Image(decode=False)
        for column, feature in data.features.items():
            if isinstance(feature, Image):
                data = data.cast_column(column, stored)
            elif isinstance(getattr(feature, "feature", None), Image):
                data = data.cast_column(column, List(stored))
        self._name, self._data = name, data
        self._classes = {key: kind.names for key, kind in data.features.items() if isinstance(kind, ClassLabel)}

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self._data[index])
        known = {key: names[n] for key, names in self._classes.items() if (n := row[key]) is not None and n >= 0}
        return row | dict.fromkeys(self._classes) | known  # -1 means that the row has no class

    def where(self, index: int) -> str:
        """Return the name of the data set and the number of the row, for messages."""
        return f"{self._name}, row {index + 1}"


Rows = FileRows | HubRows


def open_rows(dataset: Dataset) -> Rows:
    """Return the rows of a data set from the hub, from a file, or from the sample data set of ftbench.

    Raises:
        DataError: The file cannot be read.
        MissingError: The hub cannot be reached.
    """
    if dataset.name == "sample":
        return read_file(SAMPLE)
    if dataset.path:
        return read_file(Path(dataset.path))
    import datasets

    source = dataset.source
    try:
        data = datasets.load_dataset(
            source.hub, source.config or dataset.subset, split=dataset.split, revision=dataset.revision
        )
    except Exception as error:  # noqa: BLE001 - errors of the hub client have no common base class
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MissingError(
            f"data set {dataset.name} ({source.hub}) cannot be loaded: {reason}. Load it once on a machine with access "
            "to the hub, or use dataset=sample, or your own file with dataset.name=file and dataset.path"
        ) from None
    return HubRows(dataset.name, data)


def export(dataset: Dataset, out: Path, most: int, pairs: bool = False) -> None:
    """Write at most `most` evenly spaced rows to `out`, but skip unusable rows. Write the total number of rows and the
    row format to a second file with the suffix `.count`. Raise DataError if no row is usable."""
    rows = open_rows(dataset)
    format_name = row_format(dataset, rows[0], rows.where(0), pairs)
    with out.open("w", encoding="utf-8") as file:
        for index in (indices := range(0, len(rows), -(-len(rows) // most))):
            try:
                parsed = row_example(dataset, rows[index], format_name, rows.where(index))
            except DataError:
                if index == indices[-1] and file.tell() == 0:
                    raise
                continue
            file.write(json.dumps(_exported(parsed), ensure_ascii=False) + "\n")
    out.with_suffix(".count").write_text(json.dumps({"rows": len(rows), "format": format_name}))


def _exported(parsed: Example) -> dict[str, Any]:
    if parsed.text is not None:
        return {"text": parsed.text}
    if parsed.rejected:
        return {"chosen": [*parsed.messages], "rejected": [*parsed.rejected]}
    return {"messages": [{**message, "content": with_markers(message["content"])} for message in parsed.messages]}


def main() -> int:
    """Export the data set that the command line describes. Print errors to stderr, and return the exit code."""
    spec, out, most, *pairs = sys.argv[1:]
    try:
        export(Dataset.model_validate_json(spec), Path(out), int(most), bool(pairs))
    except FtbenchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
