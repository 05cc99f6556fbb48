"""The ``specjax`` command: its sub-commands are the files in this folder.

``specjax generate ...`` runs ``generate.py``'s ``main``. Only the chosen file is imported, so help and
mistyped names answer at once.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import specjax
from specjax.scripts import _cli

__all__ = ["commands", "main"]


def commands() -> dict[str, Path]:
    """The sub-commands and their files. Names with a leading underscore are not for users."""
    files = sorted(Path(__file__).parent.glob("[!_]*.py"))
    return {file.stem.replace("_", "-"): file for file in files}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sub-command that the first argument names, and gives its exit code."""
    return _cli.run(_dispatch, argv, command="specjax")


def _dispatch(argv: Sequence[str] | None) -> int:
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    known = commands()
    if name in ("-h", "--help"):
        print(_help(known))
        return 0
    if name == "--version":
        print(f"specjax {specjax.__version__}")
        return 0
    if name not in known:
        similar = difflib.get_close_matches(name, known, n=1)
        hint = f", did you mean '{similar[0]}'?" if similar else ""
        _cli.fail(f"unknown command '{name}'{hint} (commands: {', '.join(known)})")

    def job(argv: Sequence[str] | None) -> int | None:
        return importlib.import_module(f"specjax.scripts.{known[name].stem}").main(argv)

    return _cli.run(job, rest, command=f"specjax {name}")


def _help(known: dict[str, Path]) -> str:
    width = max(map(len, known), default=0)
    lines = [f"  {name:{width}}  {_summary(file)}" for name, file in known.items()]
    return "\n".join(
        [
            "usage: specjax COMMAND [OPTIONS]",
            "",
            "Lossless speculative decoding in JAX.",
            "",
            *lines,
            "",
            "specjax COMMAND --help explains one; specjax --version prints the version.",
        ]
    )


def _summary(file: Path) -> str:
    """The first line of a script's docstring, read without importing the script."""
    return (ast.get_docstring(ast.parse(file.read_bytes())) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
