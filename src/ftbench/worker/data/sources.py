"""Where rows come from: the hub, the shipped sample, or a file of the user's."""

from pathlib import Path
from typing import Any, Protocol

from ftbench.core.data_files import read_file
from ftbench.errors import MissingError
from ftbench.facts import SAMPLE
from ftbench.spec.datasets import Dataset


class Rows(Protocol):
    """A sequence of rows; `where` names a row for an error message, `folder` is where their paths begin."""

    @property
    def folder(self) -> Path | None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    def where(self, index: int) -> str: ...


class HubRows:
    """Rows of a hub data set, read when asked for: images as they are stored, classes by their names."""

    folder: Path | None = None

    def __init__(self, name: str, data: Any) -> None:
        import datasets

        stored = datasets.Image(decode=False)
        for column, feature in data.features.items():
            if isinstance(feature, datasets.Image):
                data = data.cast_column(column, stored)
            elif isinstance(getattr(feature, "feature", None), datasets.Image):
                data = data.cast_column(column, datasets.List(stored))
        self._name, self._data = name, data
        self._classes = {
            key: kind.names for key, kind in data.features.items() if isinstance(kind, datasets.ClassLabel)
        }

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = dict(self._data[index])
        return row | {key: names[row[key]] for key, names in self._classes.items() if row[key] is not None}

    def where(self, index: int) -> str:
        return f"{self._name}, row {index + 1}"


def open_rows(dataset: Dataset) -> Rows:
    """Return the rows of a named data set or file. Raise DataError or MissingError with a way out."""
    if dataset.name == "sample":
        return read_file(SAMPLE)
    if dataset.path:
        return read_file(Path(dataset.path))
    return _hub(dataset)


def _hub(dataset: Dataset) -> HubRows:
    import datasets

    source = dataset.source
    try:
        data = datasets.load_dataset(
            source.hub, source.config or dataset.subset, split=dataset.split, revision=dataset.revision
        )
    except Exception as error:  # noqa: BLE001 - the hub client's errors share no base class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise MissingError(
            f"data set {dataset.name} ({source.hub}) cannot be loaded: {reason}. Load it once on a machine with access "
            "to the hub, or take dataset=sample, or your own file with dataset.name=file and dataset.path"
        ) from None
    return HubRows(dataset.name, data)
