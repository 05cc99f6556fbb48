"""Runs tests on copies of the library with one fault planted: a name a line in, a JSON report a line out.

    python tests/mutants/worker.py FOLDER    (FOLDER is empty, and gets the copy)

JAX is imported once; each run is a fork of this process, so that nothing of it is left for the next.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import jax  # noqa: F401  what takes longest to import, and starts nothing yet
import pytest

TESTS = Path(__file__).resolve().parent.parent


def load_table() -> dict:
    spec = importlib.util.spec_from_file_location("mutant_table", Path(__file__).with_name("table.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {mutant.name: mutant for mutant in module.MUTANTS}


def copy_library(folder: Path) -> None:
    """Lays the library out as it is when installed."""
    for source, name in (
        ("specjax", "specjax"),
        ("models", "specjax/models"),
        ("scripts", "specjax/scripts"),
    ):
        shutil.copytree(TESTS.parent / source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def run_tests(folder: Path, killers: list[str]) -> tuple[int, str]:
    """Exit code and output of pytest on ``killers``, in a fork whose ``specjax`` is the copy."""
    with tempfile.TemporaryFile("w+") as log:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # JAX warns of forks; it has no threads here yet
            child = os.fork()
        if not child:
            signal.alarm(300)  # a fault may have made a loop endless
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.path.insert(0, str(folder))
            options = ["-q", "-n0", "--tb=short", "-p", "no:cacheprovider", f"--rootdir={TESTS.parent}"]
            code = pytest.main([*options, "-c", str(TESTS.parent / "pyproject.toml"), *killers])
            sys.stdout.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        log.seek(0)
        return code, log.read()


def main(folder: Path) -> None:
    table = load_table()
    copy_library(folder)
    os.chdir(folder)
    # Compiled Python is kept from run to run: by the time of its source, of which no two edits share one.
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder / "bytecode"), False
    ticks = itertools.count()

    def write(file: Path, text: str) -> None:
        file.write_text(text)
        os.utime(file, (tick := next(ticks), tick))

    for line in sys.stdin:
        mutant = table[line.strip()]
        file = folder / "specjax" / mutant.file
        source = file.read_text()
        report = {"occurrences": source.count(mutant.old)}
        if report["occurrences"] == 1:
            write(file, source.replace(mutant.old, mutant.new))
            with contextlib.ExitStack() as undo:
                undo.callback(write, file, source)
                report["code"], report["output"] = run_tests(
                    folder, [f"{TESTS}/{test}" for test in mutant.killers]
                )
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
