"""Every error a user can meet, with the exit code of the command that ends with it.

FtbenchError            1  a run failed
├── SpecError           2  the command or the spec is wrong
├── DataError           2  a data file is wrong: names file and row
├── MissingError        3  something is missing on this machine: a package, a model, a GPU, disk space
└── NotAppliedError     1  something was asked for and a library did not do it

A message is a sentence with a way out; it is printed as it is, without a traceback.
"""

import errno


class FtbenchError(Exception):
    """An error whose text is meant for the user."""

    exit_code = 1


class SpecError(FtbenchError):
    """The command line or the spec is wrong; `problems` holds one sentence for each mistake found."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DataError(FtbenchError):
    """A data file cannot be used; the message names the file and the row."""

    exit_code = 2


class MissingError(FtbenchError):
    """This machine lacks what the command needs."""

    exit_code = 3


class NotAppliedError(FtbenchError):
    """A library silently ignored what the spec asked for; the message names the object that shows it."""


INTERRUPTED = 130
UNREAD = 141  # whoever was to read stdout has closed it: as of a tool that SIGPIPE ends


def file_problem(error: OSError, what: str = "cannot be read ({})") -> str:
    """Return in words why a file cannot be opened; `what` takes the system's words."""
    return "no file can have so long a name" if error.errno == errno.ENAMETOOLONG else what.format(error.strerror)


def json_problem(error: ValueError | RecursionError) -> str:
    """Return in words why a text cannot be read as JSON."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return "a number of thousands of digits" if "set_int_max_str_digits" in str(error) else str(error)
