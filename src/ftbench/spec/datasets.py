"""What can be trained on: the names a spec may use. The other half is `worker/data/`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator, model_validator

from ftbench.spec.base import Float, Int, Part, Switch, known

FORMATS = ("alpaca", "messages", "prompt-completion", "text")
Format = Literal["alpaca", "messages", "prompt-completion", "text"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a named data set comes from; `hub` is a Hugging Face data set id. `mean_tokens` is the mean length that a
    synthetic data set `like` it is drawn to, and `sigma` the spread of the log of the lengths."""

    meaning: str
    hub: str | None = None
    config: str | None = None
    format: Format | None = None
    mean_tokens: float | None = None
    sigma: float | None = None


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
    "file": Source("your own JSON, JSONL, CSV or Parquet file (`path`)"),
    "synthetic": Source("made tokens of chosen lengths, random or learnable; needs no tokenizer and no download"),
}  # fmt: skip
LIKE = tuple(name for name, source in DATASETS.items() if source.mean_tokens)


class Dataset(Part):
    """What is trained on, how much of it, and how long a sample may be."""

    name: str = Field("sample", description="one of `ftbench list datasets`")
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
    revision: str | None = Field(None, description="revision of a hub data set")
    length: Int | None = Field(None, ge=2, description="synthetic: every sample has this many tokens")
    mean_length: Float | None = Field(None, ge=2, description="synthetic: lengths drawn log-normally to this mean")
    like: str | None = Field(None, description="synthetic: lengths drawn like this data set's")
    structure: Literal["random", "markov"] = Field(
        "random",
        description="synthetic: random tokens, which nothing can learn, or a Markov chain, which any model learns",
    )

    @field_validator("name")
    @classmethod
    def _known_name(cls, value: str) -> str:
        known(value, DATASETS, "data set")
        return value

    @field_validator("like")
    @classmethod
    def _known_profile(cls, value: str | None) -> str | None:
        if value is not None:
            known(value, LIKE, "length profile")
        return value

    @model_validator(mode="after")
    def _check(self) -> Dataset:
        if self.name == "file" and not self.path:
            raise ValueError("`name: file` needs `path: FILE` (JSON, JSONL, CSV or Parquet)")
        if self.name != "file" and self.path:
            raise ValueError(f"`path` goes with `name: file`, not with {self.name}")
        if self.name != "file" and self.format:
            raise ValueError(f"`format` goes with `name: file`: {self.name} has its own")
        shape = [key for key in ("length", "mean_length", "like") if getattr(self, key) is not None]
        if self.name == "synthetic" and len(shape) != 1:
            raise ValueError("`name: synthetic` needs one of `length`, `mean_length` and `like`")
        if self.name == "synthetic" and self.samples is None:
            raise ValueError("`name: synthetic` needs `samples`")
        if self.name != "synthetic" and self.structure != "random":
            raise ValueError(f"`structure` goes with `name: synthetic`, not with {self.name}")
        if self.name != "synthetic" and shape:
            raise ValueError(f"`{shape[0]}` goes with `name: synthetic`, not with {self.name}")
        if self.length is not None and self.length > self.max_length:
            raise ValueError(f"`length` {self.length} is more than `max_length` {self.max_length}")
        return self
