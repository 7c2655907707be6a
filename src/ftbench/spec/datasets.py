"""Declare the section `dataset:` and the named datasets, and check dataset rows. `worker/data/` prepares samples."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ftbench.core.units import some
from ftbench.errors import DataError, MissingError
from ftbench.spec.base import Float, Int, Part, Switch, known, nearest, shown
from ftbench.spec.methods import reads_images

if TYPE_CHECKING:
    from ftbench.core.data_formats import Example
    from ftbench.spec.base import Model

FILES = (".json", ".jsonl", ".csv", ".parquet")
Format = Literal[
    "alpaca", "messages", "prompt-completion", "question-answer", "text", "image-text", "preference", "prompt"
]  # fmt: skip
Role = Literal[
    "prompt", "completion", "chosen", "rejected", "question", "answer", "instruction", "input", "output", "messages",
    "text", "image", "images",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a named dataset.

    Args:
        meaning: One-line description for `ftbench list datasets`.
        hub: Hugging Face dataset id.
        config: Configuration (subset) of the hub dataset.
        format: Format of the rows.
        mean_tokens: Mean sample length in tokens, used by `dataset.like`.
        sigma: Standard deviation of log(length), used by `dataset.like`.
        image_size: Width and height of the images in pixels.
    """

    meaning: str
    hub: str | None = None
    config: str | None = None
    format: str | None = None
    mean_tokens: float | None = None
    sigma: float | None = None
    image_size: tuple[int, int] | None = None


# Mean lengths of the Japanese datasets: from the founding study, truncated at 2,048 tokens (docs/evidence).
# The values of sigma are typical of instruction and article data.
DATASETS: dict[str, Source] = {
    "sample": Source("200 instruction pairs in Japanese and English that ship with ftbench", format="alpaca"),
    "japanese-alpaca": Source(
        "52k translated instruction pairs", "fujiki/japanese_alpaca_data", format="alpaca", mean_tokens=117, sigma=0.65
    ),
    "alpaca": Source("52k English instruction pairs", "tatsu-lab/alpaca", format="alpaca"),
    "wikipedia-ja": Source(
        "Japanese articles: the body without its first sentence → the title",
        "wikimedia/wikipedia", "20231101.ja", format="wikipedia-title", mean_tokens=861, sigma=0.95,
    ),
    "beans": Source(
        "1k photographs of bean leaves → the disease", "AI-Lab-Makerere/beans", format="image-text",
        image_size=(500, 500),
    ),
    "file": Source("a JSON, JSONL, CSV or Parquet file (`path`), or a folder with such a file and its images"),
    "images": Source("generated images of a given size (`image_size`) and tokens; no download"),
    "synthetic": Source(
        "generated tokens of given lengths, random or learnable (pairs with objective dpo); no tokenizer, no download"
    ),
}  # fmt: skip
Side = Annotated[Int, Field(ge=8, le=16_384)]
HUB, _MADE = "owner/name", ("synthetic", "images")
_ONLY_FOR = {  # {key: datasets that support the key}
    **dict.fromkeys(("format", "columns"), ("file", HUB)), **dict.fromkeys(("subset", "split"), (HUB,)),
    **dict.fromkeys(("length", "mean_length", "like", "structure"), _MADE), "path": ("file",),
    **dict.fromkeys(("image_size", "image_sizes", "images_per_sample"), ("images",)),
}  # fmt: skip
LIKE = tuple(name for name, source in DATASETS.items() if source.mean_tokens)


class Dataset(Part):
    """The data, the number of samples and their maximum length."""

    name: str = Field("sample", description="one of `ftbench list datasets`, or owner/name of a dataset on the hub")
    samples: Int | None = Field(None, ge=1, description="number of samples, drawn with `seed`; default: all")
    max_length: Int = Field(2048, ge=2, le=1_048_576, description="max tokens per sample; longer samples are truncated")
    seed: Int = Field(42, ge=0, description="seed of the sample order and of synthetic data")
    eval_samples: Int = Field(0, ge=0, description="samples held out for evaluation")
    loss_on: Literal["completion", "all"] = Field("completion", description="which tokens contribute to the loss")
    longest_first: Switch = Field(
        False, description="put the longest samples in the first batch; the memory peak is then in step 1"
    )
    format: Format | None = Field(None, description="format of the rows; default: detected from the columns")
    path: str | None = Field(None, description="file to read, for `name: file`")
    columns: dict[Role, str] = Field(
        {}, description="role → column, if your columns have other names: {prompt: question, completion: answer}"
    )
    prompt: str = Field("Describe", min_length=1, description="question about the image, if the rows have no question")
    image_size: tuple[Side, Side] | None = Field(None, description="images: width and height in pixels, or their means")
    image_sizes: Literal["fixed", "photographs", "documents"] = Field(
        "fixed", description="images: one size, or the various sizes of photographs or scanned pages"
    )
    images_per_sample: Int = Field(1, ge=1, le=64, description="images: number of images per sample")
    revision: str | None = Field(None, description="revision of a hub dataset")
    subset: str | None = Field(None, description="configuration of a hub dataset")
    split: str = Field("train", min_length=1, description="split of a hub dataset")
    length: Int | None = Field(None, ge=2, description="synthetic: every sample has this many tokens")
    mean_length: Float | None = Field(None, ge=2, description="synthetic: mean length; the lengths are log-normal")
    like: Literal[*LIKE] | None = Field(  # type: ignore[valid-type]
        None, description="synthetic: draw lengths with the distribution of this dataset"
    )
    structure: Literal["random", "tasks"] = Field(
        "random",
        description="synthetic: random tokens (not learnable), or tasks with masked prompts (copying, key-value "
        "recall, brackets; images: colors of cells)",
    )

    @property
    def is_generated(self) -> bool:
        """Whether ftbench generates the samples."""
        return self.name in _MADE

    @property
    def has_images(self) -> bool:
        """Whether the samples have images. If the format of the rows is unknown, this is False."""
        return self.name == "images" or "image-text" in (self.format, self.source.format)

    @property
    def may_have_images(self) -> bool:
        """Whether the samples may have images. This is True for files and hub datasets, which are read later."""
        return self.has_images or self.name == "file" or self.name not in DATASETS

    @property
    def has_many_image_sizes(self) -> bool:
        """Whether the images may have different sizes."""
        return self.may_have_images and not (self.name == "images" and self.image_sizes == "fixed")

    @property
    def source(self) -> Source:
        return DATASETS.get(self.name) or Source("a dataset on the hub", self.name)

    @field_validator("name")
    @classmethod
    def _known_name(cls, value: str) -> str:
        if Path(value).suffix.lower() in FILES:
            raise ValueError(f"{shown(value)} is a file: write `dataset: {{name: file, path: {value}}}`")
        return value if re.fullmatch(r"[\w.-]+/[\w.-]+", value) else known(value, DATASETS, "dataset")

    def __hash__(self) -> int:
        return hash((self.name, self.path, self.samples, self.seed))  # `columns` is a dict, which is not hashable

    @model_validator(mode="after")
    def _check(self) -> Dataset:
        kind = self.name if self.name in DATASETS else HUB
        for key, kinds in _ONLY_FOR.items():
            if kind not in kinds and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"`{key}` goes with `name: {' or '.join(kinds)}`, not with {self.name}")
        needed = {"file": ["path"], "images": ["image_size", "samples"], "synthetic": ["samples"]}.get(self.name, ())
        if missing := [key for key in needed if getattr(self, key) is None]:
            raise ValueError(f"`name: {self.name}` needs `{missing[0]}`")
        lengths = [key for key in ("length", "mean_length", "like") if getattr(self, key) is not None]
        if len(lengths) > 1 or (self.name == "synthetic" and not lengths):
            raise ValueError(f"`name: {self.name}` needs exactly one of `length`, `mean_length` and `like`")
        if self.length is not None and self.length > self.max_length:
            raise ValueError(f"`length` {self.length} is larger than `max_length` {self.max_length}")
        return self


MOST_CHECKED = 1000  # rows of a file that are checked before a run starts


def row_format(dataset: Dataset, row: Mapping[str, Any], where: str, pairs: bool = False) -> str:
    """Return the format of a dataset's rows. If the spec does not set the format, detect it from the first row.

    `where` is the file and the line of this row. `pairs` means that the objective needs preference pairs. Raise
    DataError if no format matches, or if a column in `dataset.columns` is missing."""
    for role, column in dataset.columns.items():
        if column not in row:
            named = f"{', '.join(map(str, row))}{nearest(column, map(str, row))}"
            raise DataError(f"{where}: dataset.columns: there is no column `{column}` for {role}: {named}")
    from ftbench.core.data_formats import detect

    return dataset.format or dataset.source.format or detect(named_row(row, dataset), where, pairs)


def named_row(row: Mapping[str, Any], dataset: Dataset) -> dict[str, Any]:
    """Return a copy of the row. For each role in `dataset.columns`, such as `prompt`, add the value of its column."""
    return {**row, **{role: row.get(column) for role, column in dataset.columns.items()}}


def row_example(dataset: Dataset, row: Mapping[str, Any], format_name: str, where: str) -> Example:
    """Convert a row into an Example. Raise DataError if the row is invalid."""
    from ftbench.core.data_formats import BadRow, example

    try:
        parsed = example(named_row(row, dataset), format_name, dataset.prompt)
        # text that no file and no tokenizer can take is an error
        json.dumps((parsed.messages, parsed.rejected, parsed.text), ensure_ascii=False, default=str).encode()
        return parsed
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {error.object[error.start]!r} is half of a surrogate pair: remove it") from None
    except BadRow as error:
        raise DataError(f"{where}: {error} (format {format_name})") from None


def check_file(dataset: Dataset, model: Model, pairs: bool = False, needed: int = 0) -> None:
    """Check the first 1,000 rows of a file or folder. Raise DataError for a bad row, fewer rows than `needed`, or
    images that the model cannot read."""
    if not dataset.path or not Path(dataset.path).exists():
        return
    from ftbench.core.data_files import read_file

    try:
        rows = read_file(Path(dataset.path), MOST_CHECKED)
    except MissingError:  # the Parquet reader may be installed only on the training machine
        return
    format_name = row_format(dataset, rows[0], rows.where(0), pairs)
    examples = [row_example(dataset, rows[at], format_name, rows.where(at)) for at in range(len(rows))]
    check_images(dataset, model, examples)
    if len(rows) < min(MOST_CHECKED, needed):
        raise DataError(too_few_rows(dataset, len(rows)))


def check_images(dataset: Dataset, model: Model, examples: Iterable[Example]) -> None:
    """Raise DataError if an example has images and the model is text-only."""
    if [example for example in examples if example.images] and not reads_images(model):
        raise DataError(f"{dataset.path} has images and {model.id} is text-only: use a model with images")


def too_few_rows(dataset: Dataset, rows: int, note: str = "") -> str:
    """Return the error message for a data set with too few rows. `note` follows the number of rows."""
    evaluated = f" and {dataset.eval_samples:,} to evaluate on" if dataset.eval_samples else ""
    return (
        f"dataset: {dataset.path or dataset.name} has only {some(rows, 'row')}{note}: too few for "
        f"{some(dataset.samples or 1, 'sample')}{evaluated}; lower dataset.samples or dataset.eval_samples"
    )
