"""Rewards of completions: the built-in one, and functions in a user's file, which the worker executes."""

import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from ftbench.core import oom
from ftbench.core.rows import FLOAT32
from ftbench.core.units import some
from ftbench.errors import FtbenchError, SpecError, file_problem
from ftbench.spec.base import shortened, shown
from ftbench.spec.objectives import reward_parts

EVEN = "share of even token ids"
_TAKEN = {
    "prompt", "prompts", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric",
    "environments",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reward:
    """A user's reward function. `name` is `file.py:function`, and `sha256` is the hash of the executed file."""

    name: str
    sha256: str
    file: str
    function: Callable[..., Any]

    def __call__(self, completions: Sequence[str], **given: Any) -> list[float]:
        """Return a finite number per completion. Raise SpecError for other values and for errors of the function."""
        count = len(completions)
        numbers = _call(self.name, self.file, partial(self._numbers, completions=completions, **given))
        if len(numbers) != count:
            raise self._error(f"returned {some(len(numbers), 'number')} for {some(count, 'completion')}")
        for position, number in enumerate(numbers, 1):
            if not (isinstance(number, (int, float)) and abs(number) <= FLOAT32):
                raise self._error(f"returned {shown(number)} for completion {position} instead of a finite number")
        return [float(number) for number in numbers]

    def _numbers(self, **given: Any) -> list[Any]:
        result = self.function(**given)
        result = result.tolist() if hasattr(result, "tolist") else result
        if isinstance(result, (str, Mapping)) or not isinstance(result, Iterable):
            raise self._error(f"returned {shown(result)} instead of a list with one number per completion")
        return [each.item() if hasattr(each, "item") else each for each in result]

    def _error(self, problem: str) -> SpecError:
        return SpecError(f"objective.reward: {self.name} {problem}")


def even_tokens(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Return the share of even token ids in each completion. Every model can learn this reward."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def load(reward: str) -> Reward:
    """Execute a file and return its reward function. Raise SpecError if the file or the function is unusable."""
    file, function = reward_parts(reward)
    name = f"{file.name}:{function}"
    try:
        source = file.read_bytes()
    except OSError as error:
        raise SpecError(f"objective.reward: {file}: {file_problem(error)}") from None
    sha256 = hashlib.sha256(source).hexdigest()
    module = ModuleType(f"reward_{sha256}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # dataclasses and pickle look definitions up here
    _call(name, str(file), lambda: exec(compile(source, str(file), "exec"), module.__dict__))
    reward_function = getattr(module, function, None)
    if not callable(reward_function):
        raise SpecError(f"objective.reward: {file} does not define {function}")
    if inspect.iscoroutinefunction(reward_function):
        raise SpecError(f"objective.reward: {name} is async: make it a plain `def`")
    parameters = inspect.signature(reward_function).parameters.values()
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        raise SpecError(
            f"objective.reward: {name} does not accept `**columns`: write `def {function}(completions, **columns)`"
        )
    return Reward(name, sha256, str(file), reward_function)


def _call(name: str, file: str, call: Callable[[], Any]) -> Any:
    """Call into a user's file. Turn its errors into SpecErrors with the line, except for out of memory."""
    try:
        return call()
    except (FtbenchError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}"
        if oom.recognise(text):
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        lines += [error.lineno] if isinstance(error, SyntaxError) else []
        where = f", line {lines[-1]}" if lines else ""
        raise SpecError(f"objective.reward: {name}{where}: {shortened(text)} (see log.txt)") from error


def columns(rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Return each row's columns for the reward functions, except those with names of trl's own arguments."""
    names = dict.fromkeys(str(name) for row in rows for name in row or {})
    free = [name for name in names if name not in _TAKEN]
    return [{name: (row or {}).get(name) for name in free} for row in rows]
