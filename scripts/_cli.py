"""What every job shares: reading its command line, refusing bad input in one line, starting JAX.

A job is a file in this folder: its docstring is its help, ``Config`` its options, ``main`` its work::

    @dataclasses.dataclass(frozen=True)
    class Config:
        count: int = 1  # followed by a docstring: the option's help

    def main(argv: Sequence[str] | None = None) -> int | None:
        config = _cli.parse(Config, argv, __doc__)

    if __name__ == "__main__":
        sys.exit(_cli.run(main))
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

__all__ = ["UsageError", "blame_input", "cache_folder", "command_name", "fail", "parse", "run", "start"]

T = TypeVar("T")
Main = Callable[[Sequence[str] | None], int | None]


class UsageError(Exception):
    """What the user gave cannot be used; the text says what is wrong and what would be right."""

    exit_code = 2


def fail(message: str) -> NoReturn:
    """Ends the job with one line, ``specjax NAME: error: message``, and exit code 2."""
    raise UsageError(message)


@contextlib.contextmanager
def blame_input(*errors: type[Exception]) -> Iterator[None]:
    """Around the reading of what the user gave: these errors (OSError, ValueError) are theirs, not bugs."""
    kinds = errors or (OSError, ValueError)
    try:
        yield
    except kinds as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise UsageError(f"{error.filename}: {error.strerror}") from error
        raise UsageError(str(error)) from error


def command_name(module: str) -> str:
    """``specjax generate`` for that script's module, whichever way it was started."""
    stem = Path(sys.argv[0]).stem if module == "__main__" else module.rpartition(".")[2]
    return f"specjax {stem.replace('_', '-')}"


def parse(config: type[T], argv: Sequence[str] | None, description: str | None) -> T:
    """Reads a command line into a dataclass of options.

    Args:
      config: a frozen dataclass; the docstrings of its fields are the options' help. A ValueError from
        its ``__post_init__`` is reported like any other bad option.
      argv: the arguments after the command's name; None takes the process's own.
      description: shown above the options by ``--help``: a job's docstring.

    Raises:
      UsageError: an option is unknown, missing or of the wrong type.
    """
    import tyro  # here, so that `specjax --help` need not wait for it

    command = command_name(config.__module__)
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(config, prog=command, description=description, args=argv)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
    raise UsageError(f"{_sentence(box.getvalue())} (options: {command} --help)")


def _sentence(box: str) -> str:
    """The message inside the framed text that tyro prints, on one line and in the user's words."""
    plain = re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯]", "", box)
    # Rules part a frame into sections. A frame of box characters has its title in the topmost rule; one for
    # a terminal without them has a section for it.
    sections = [" ".join(part.split()) for part in re.split(r"(?m)^ *(?:─.*|-{3,} *)$", plain)]
    sections = [section for section in sections if section]
    text = next(iter(sections[0 if "─" in plain else 1 :]), "the command line cannot be read")
    for pattern, words in (
        (r"^Unrecognized options: (--?[^ ,]+).*", r"unknown option \1"),
        (r"^Unrecognized options: ([^,]+).*", r"unexpected argument '\1'"),
        (r"^Missing from [^:]*: ", "missing: "),
        (r"^Error parsing (?:[A-Z]\w*: )?", ""),
        (
            r"no type matching \{None\}\|(\w+) could be instantiated from \['([^']*)'\].*",
            r"expected \1, got '\2'",
        ),
        (r"invalid literal for int\(\) with base 10: ", "expected a whole number, got "),
        (r"could not convert string to float: ", "expected a number, got "),
    ):
        text = re.sub(pattern, words, text)
    similar = re.search(r"Perhaps you meant:\s+(--[\w-]+)", plain)
    return text.rstrip(".") + (f"; did you mean {similar[1]}?" if similar else "")


def run(main: Main, argv: Sequence[str] | None = None, *, command: str | None = None) -> int:
    """Runs a job and gives its exit code: 2 with one line on bad input, 130 on Ctrl-C.

    Anything else that goes wrong is a bug, and keeps its traceback.
    """
    command = command or command_name(main.__module__)
    try:
        code = main(argv) or 0
        if sys.stdout is not None:  # closed by who started it
            sys.stdout.flush()  # a reader who has gone away shows here, while it can still be caught
        return code
    except UsageError as error:
        print(f"{command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # `specjax ... | head`: not an error.
        _silence_stdout()
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        name = error.filename or "the output"
        print(f"{command}: error: {name} can't be written: {error.strerror}", file=sys.stderr)
        _silence_stdout()
        return 1


def _silence_stdout() -> None:
    """What is still to be written goes nowhere: the interpreter flushes stdout once more on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def cache_folder() -> Path:
    """The user's cache folder for specjax."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specjax"


def start() -> None:
    """Keeps compiled programs in the user's cache folder, so that a second run starts fast.

    Call it before the first compilation. JAX's own environment variables win over these values.
    """
    import jax  # here, so that `specjax --help` need not wait for it

    for option, value in (
        ("jax_compilation_cache_dir", str(cache_folder() / "xla")),
        ("jax_persistent_cache_min_compile_time_secs", 0),  # the many small programs add up
    ):
        if option.upper() not in os.environ:
            jax.config.update(option, value)
