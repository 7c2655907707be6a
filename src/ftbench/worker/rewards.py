"""Rewards of completions: that of ours, and functions of a user's own, whose file is executed here, in the child."""

import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
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
    """A function of a user's: `name` is `file.py:function`, `sha256` that of the file as it was executed."""

    name: str
    sha256: str
    file: str
    function: Callable[..., Any]

    def __call__(self, completions: Sequence[str], **given: Any) -> list[float]:
        """Return a finite number for each completion. Raise SpecError for anything else, and for what the function
        raises, with the line in its file."""
        count = len(completions)
        numbers = _blamed(self.name, self.file, partial(self._made, count, completions=completions, **given))
        if len(numbers) != count:
            made = f"more than {some(count, 'number')}" if len(numbers) > count else some(len(numbers), "number")
            raise self._wrong(f"gave {made} for {some(count, 'completion')}")
        for position, number in enumerate(numbers, 1):
            if not (isinstance(number, (int, float)) and abs(number) <= FLOAT32):
                raise self._wrong(f"gave {shown(number)} for completion {position}: a finite number is asked for")
        return [float(number) for number in numbers]

    def _made(self, count: int, **given: Any) -> list[Any]:
        """Return what the function gives, of what does not end no more than one too many."""
        made = self.function(**given)
        made = made.tolist() if hasattr(made, "tolist") else made
        if isinstance(made, (str, Mapping)) or not isinstance(made, Iterable):
            raise self._wrong(f"gave {shown(made)}, and a list of numbers is asked for, one a completion")
        return [each.item() if hasattr(each, "item") else each for each in islice(made, count + 1)]

    def _wrong(self, what: str) -> SpecError:
        return SpecError(f"objective.reward: {self.name} {what}")


def even_tokens(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Return the share of even token ids in each completion: a reward that needs no other model, that any model can
    learn, and that says nothing of how good an answer is."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def load(reward: str) -> Reward:
    """Execute a file and return its function. Raise SpecError for a file that ends by an error, for a function that it
    has not, and for one that takes not what trl gives."""
    file, function = reward_parts(reward)
    name = f"{file.name}:{function}"
    try:
        source = file.read_bytes()
    except OSError as error:
        raise SpecError(f"objective.reward: {file}: {file_problem(error)}") from None
    sha256 = hashlib.sha256(source).hexdigest()
    module = ModuleType(f"reward_{sha256}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for what it defines
    _blamed(name, str(file), lambda: exec(compile(source, str(file), "exec"), module.__dict__))
    judge = getattr(module, function, None)
    if not callable(judge):
        raise SpecError(f"objective.reward: {file} has no function {function}")
    if inspect.iscoroutinefunction(judge):
        raise SpecError(f"objective.reward: {name} is async, and completions are judged at once: make it a plain `def`")
    if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in inspect.signature(judge).parameters.values()):
        raise SpecError(
            f"objective.reward: {name} takes no `**columns`: write `def {function}(completions, **columns)`"
        )
    return Reward(name, sha256, str(file), judge)


def _blamed(name: str, file: str, call: Callable[[], Any]) -> Any:
    """Return what a call into a user's file returns. Raise SpecError with the line there for what it raises; memory
    that has run out is no mistake of its."""
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
    """Return what a function is given of each prompt's row: all columns of any, None where a row has not one of them,
    and none by which trl gives something else."""
    names = dict.fromkeys(str(name) for row in rows for name in row or {})
    kept = [name for name in names if name not in _TAKEN]
    return [{name: (row or {}).get(name) for name in kept} for row in rows]
