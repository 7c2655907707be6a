"""What can be trained on: the names a spec may use. The other half is `worker/data/`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ftbench.spec.base import Float, Int, Part, Switch, known, shown

_FILES = (".json", ".jsonl", ".csv", ".parquet")
Format = Literal[
    "alpaca", "messages", "prompt-completion", "question-answer", "text", "image-text", "preference", "prompt"
]  # fmt: skip
Role = Literal[
    "prompt", "completion", "chosen", "rejected", "question", "answer", "instruction", "input", "output", "messages",
    "text", "image", "images",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """Where a named data set comes from; `hub` is a Hugging Face data set id. `mean_tokens` is the mean length that a
    synthetic data set `like` it is drawn to, and `sigma` the spread of the log of the lengths; `image_size` width and
    height of its pictures."""

    meaning: str
    hub: str | None = None
    config: str | None = None
    format: Format | None = None
    mean_tokens: float | None = None
    sigma: float | None = None
    image_size: tuple[int, int] | None = None


# Mean lengths of the two Japanese sets: the founding study's, after truncation at 2,048 tokens (facts/seed figures);
# the spreads are those of the plain scripts measured beside ftbench, chosen to look like instruction and article data.
DATASETS: dict[str, Source] = {
    "sample": Source("200 instruction pairs in Japanese and English that ship with ftbench", format="alpaca"),
    "japanese-alpaca": Source(
        "52k translated instruction pairs", "fujiki/japanese_alpaca_data", format="alpaca", mean_tokens=117, sigma=0.65
    ),
    "alpaca": Source("52k English instruction pairs", "tatsu-lab/alpaca", format="alpaca"),
    "wikipedia-ja": Source(
        "Japanese articles: the body without its first sentence → the title",
        "wikimedia/wikipedia", "20231101.ja", mean_tokens=861, sigma=0.95,
    ),
    "beans": Source(
        "1k photographs of bean leaves → their disease", "AI-Lab-Makerere/beans", format="image-text",
        image_size=(500, 500),
    ),
    "file": Source(
        "your own JSON, JSONL, CSV or Parquet file (`path`), or a folder of images with one such file that names them"
    ),
    "images": Source("made pictures and tokens of chosen sizes (`image_size`) and lengths; needs no download"),
    "synthetic": Source(
        "made tokens of chosen lengths, random or learnable, with objective dpo in pairs; needs no tokenizer and no "
        "download"
    ),
}  # fmt: skip
Side = Annotated[Int, Field(ge=8, le=16_384)]


def _sides(value: object) -> object:
    """Return width and height of a size, which one number may stand for. Raise ValueError for what is neither."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value, value
    if value is not None and not (isinstance(value, (list, tuple)) and len(value) == 2):
        raise ValueError("must be [width, height] in pixels, or one number for a square")
    return value


LIKE = tuple(name for name, source in DATASETS.items() if source.mean_tokens)


class Dataset(Part):
    """What is trained on, how much of it, and how long a sample may be."""

    name: str = Field("sample", description="one of `ftbench list datasets`, or owner/name of a set on the hub")
    samples: Int | None = Field(None, ge=1, description="how many samples to train on, drawn with `seed`; all if empty")
    max_length: Int = Field(2048, ge=2, le=1_048_576, description="tokens; longer samples are cut at the end")
    seed: Int = Field(42, ge=0, description="order of the samples and draws of synthetic data")
    eval_samples: Int = Field(0, ge=0, description="samples set aside for evaluation")
    loss_on: Literal["completion", "all"] = Field("completion", description="which tokens carry loss")
    longest_first: Switch = Field(
        False, description="the longest samples make the first batch, so that the memory peak shows in step 1"
    )
    format: Format | None = Field(None, description="of the rows; found from the columns if empty")
    path: str | None = Field(None, description="file to read, for `name: file`")
    columns: dict[Role, str] = Field(
        {}, description="which column is what, where names do not say it: {prompt: question, completion: answer}"
    )
    prompt: str = Field("Describe", min_length=1, description="question about an image where no column holds one")
    image_size: Annotated[tuple[Side, Side] | None, BeforeValidator(_sides)] = Field(
        None, description="images: width and height in pixels (one number: a square), or about which they are spread"
    )
    image_sizes: Literal["fixed", "photographs", "documents"] = Field(
        "fixed", description="images: all of one size, or spread as those of cameras or of scanned pages are"
    )
    images_per_sample: Int = Field(1, ge=1, le=64, description="images: how many pictures a sample holds")
    revision: str | None = Field(None, description="revision of a hub data set")
    subset: str | None = Field(None, description="which of a hub data set's configurations")
    split: str = Field("train", min_length=1, description="which part of a hub data set")
    length: Int | None = Field(None, ge=2, description="synthetic: every sample has this many tokens")
    mean_length: Float | None = Field(None, ge=2, description="synthetic: lengths drawn log-normally to this mean")
    like: str | None = Field(None, description="synthetic: lengths drawn like this data set's")
    structure: Literal["random", "markov"] = Field(
        "random",
        description="synthetic: random tokens, which nothing can learn, or a Markov chain, which any model learns",
    )

    @property
    def is_made(self) -> bool:
        """Whether its samples are drawn, as many as are asked for."""
        return self.name in ("synthetic", "images")

    @property
    def has_images(self) -> bool:
        """Whether its samples hold images for certain."""
        return self.name == "images" or "image-text" in (self.format, self.source.format)

    @property
    def may_have_images(self) -> bool:
        """Whether its samples hold images, as far as is known before they are read."""
        return self.has_images or self.name == "file" or self.name not in DATASETS

    @property
    def has_many_image_sizes(self) -> bool:
        """Whether its images differ in size, as far as is known before they are read."""
        return self.may_have_images and not (self.name == "images" and self.image_sizes == "fixed")

    @property
    def source(self) -> Source:
        return DATASETS.get(self.name) or Source("a data set on the hub", self.name)

    @field_validator("name")
    @classmethod
    def _known_name(cls, value: str) -> str:
        if Path(value).suffix.lower() in _FILES:
            raise ValueError(f"{shown(value)} is a file: write `dataset: {{name: file, path: {value}}}`")
        return value if re.fullmatch(r"[\w.-]+/[\w.-]+", value) else known(value, DATASETS, "data set")

    @field_validator("like")
    @classmethod
    def _known_profile(cls, value: str | None) -> str | None:
        return None if value is None else known(value, LIKE, "length profile")

    def __hash__(self) -> int:
        return hash((self.name, self.path, self.samples, self.seed))  # `columns` is a dictionary, which has no hash

    @model_validator(mode="after")
    def _check(self) -> Dataset:
        if self.name == "file" and not self.path:
            raise ValueError("`name: file` needs `path: FILE` (JSON, JSONL, CSV or Parquet)")
        if self.name != "file" and self.path:
            raise ValueError(f"`path` goes with `name: file`, not with {self.name}")
        if self.name in DATASETS and self.name != "file" and (self.format or self.columns):
            key = "format" if self.format else "columns"
            raise ValueError(f"`{key}` goes with `name: file`: {self.name} has its own")
        if self.name in DATASETS and (self.subset or self.split != "train"):
            key = "subset" if self.subset else "split"
            raise ValueError(f"`{key}` goes with owner/name of a data set on the hub, not with {self.name}")
        shape = [key for key in ("length", "mean_length", "like") if getattr(self, key) is not None]
        if self.name == "synthetic" and len(shape) != 1:
            raise ValueError("`name: synthetic` needs one of `length`, `mean_length` and `like`")
        if len(shape) > 1:
            raise ValueError(f"`{shape[0]}` and `{shape[1]}` exclude each other")
        if self.is_made and self.samples is None:
            raise ValueError(f"`name: {self.name}` needs `samples`")
        if not self.is_made and self.structure != "random":
            raise ValueError(f"`structure` goes with `name: synthetic`, not with {self.name}")
        if not self.is_made and shape:
            raise ValueError(f"`{shape[0]}` goes with `name: synthetic`, not with {self.name}")
        if (self.name == "images") != (self.image_size is not None):
            raise ValueError("`name: images` needs `image_size: [width, height]`, and no other takes it")
        if self.name != "images" and (self.image_sizes != "fixed" or self.images_per_sample != 1):
            raise ValueError(f"`image_sizes` and `images_per_sample` go with `name: images`, not with {self.name}")
        if self.length is not None and self.length > self.max_length:
            raise ValueError(f"`length` {self.length} is more than `max_length` {self.max_length}")
        return self
