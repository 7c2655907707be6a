"""Errors that commands show to the user. Each error class has the exit code of the command.

FtbenchError            1  a run failed
├── SpecError           2  the command line or the spec is wrong
├── DataError           2  a data file is wrong
├── MissingError        3  something is missing on this machine: a package, a model, a GPU, disk space
└── NotAppliedError     1  a library ignored a requested setting

A message is printed without a traceback. It gives the fact, the cause and the next command.
"""

INTERRUPTED = 130
BROKEN_PIPE = 141  # the exit code of a tool that SIGPIPE ends: the reader has closed stdout


class FtbenchError(Exception):
    """Base class of errors with a message for the user."""

    exit_code = 1


class SpecError(FtbenchError):
    """The command line or the spec is wrong. `problems` has one sentence per mistake."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DataError(FtbenchError):
    """A data file cannot be used. The message contains the file and the row."""

    exit_code = 2


class MissingError(FtbenchError):
    """Something that the command needs is missing on this machine."""

    exit_code = 3


class NotAppliedError(FtbenchError):
    """A library silently ignored a requested setting. The message contains the object with the wrong value."""


def file_problem(error: OSError) -> str:
    """Return the reason why a file cannot be read: `cannot be read (Permission denied)`."""
    return f"cannot be read ({error.strerror})"
