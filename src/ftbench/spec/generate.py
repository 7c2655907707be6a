"""`measure.generate`: fixed prompts that the model answers before and after training. Their text is part of the
resolved spec, so that a run tells what was asked wherever its files go."""

import os
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from ftbench.errors import SpecError
from ftbench.spec.base import Float, Int, Part, Switch
from ftbench.spec.reading import read_yaml

MOST = 32  # prompts: they are answered in one batch


class Prompt(Part):
    """One question, and the name it goes by."""

    id: str = Field(min_length=1, max_length=80, description="a short name")
    prompt: str = Field(min_length=1, max_length=20_000, description="what the model is asked")

    @field_validator("prompt")
    @classmethod
    def _some_text(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("is empty: write what the model is to be asked")
        return value


class Generate(Part):
    """What is asked and how answers are drawn. The defaults are the founding study's sampling (facts: 2025-11)."""

    prompts: tuple[Prompt, ...] = Field(description="list of {id, prompt}, or of YAML files that hold `prompts:`")
    max_new_tokens: Int = Field(1024, ge=1, le=32_768, description="longest answer")
    greedy: Switch = Field(False, description="always the likeliest token, instead of sampling")
    temperature: Float = Field(0.7, gt=0, le=100)
    top_k: Int = Field(50, ge=1, le=1_000_000)
    top_p: Float = Field(0.95, gt=0, le=1)
    seed: Int = Field(42, ge=0, lt=2**32, description="of the sampling; the same before and after")
    max_seconds: Float = Field(600, gt=0, le=86_400, description="answers are cut off after this time")

    @field_validator("prompts", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MOST:
            raise ValueError(f"must be a list of 1 to {MOST} prompts, each with id and prompt")
        for entry in value:
            if not isinstance(entry, Prompt) and (not isinstance(entry, dict) or set(entry) != {"id", "prompt"}):
                raise ValueError(f"{str(entry)[:60]!r} is no prompt: write {{id: a name, prompt: the question}}")
        return value

    @field_validator("prompts")
    @classmethod
    def _distinct(cls, value: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
        names = [prompt.id for prompt in value]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two prompts are named {twice[0]}: give each an id of its own")
        return value


def switched(value: object) -> object:
    """Read `off`, or a section."""
    if value is False or value == "off":
        return None
    if value is not None and not isinstance(value, (dict, Generate)):
        raise ValueError("must be off, a YAML file with prompts, a list of them, or a section with `prompts`")
    return value


def with_prompts(value: Any, folder: Path) -> Any:
    """Return what a spec says under `measure.generate`, with its prompt files read from `folder`. What a file says
    about sampling counts where the spec says nothing. Raises SpecError for a file that cannot be read."""
    if isinstance(value, str) and value != "off":
        value = [value]
    if isinstance(value, list):
        value = {"prompts": value}
    if not isinstance(value, dict) or "prompts" not in value:
        return value
    listed = value["prompts"]
    settings: dict[str, Any] = {}
    prompts: list[Any] = []
    for entry in listed if isinstance(listed, list) else [listed]:
        if isinstance(entry, str):
            file = read_yaml(folder / os.path.expanduser(entry), "a prompt file", "`prompts:`, a list of {id, prompt}")
            entries = file.pop("prompts", None)
            if not isinstance(entries, list):
                raise SpecError(f"{folder / entry}: `prompts` is a list of {{id, prompt}}, and it is not there")
            prompts += entries
            settings |= file
        else:
            prompts.append(entry)
    return settings | value | {"prompts": prompts}
