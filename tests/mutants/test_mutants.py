"""Plants one fault after another in a copy of the library: the tests named for it must fail on it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mutants.table import MUTANTS, Mutant

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """A process that plants a mutant and runs its killers: a name in, a report out."""
    script, folder = Path(__file__).with_name("worker.py"), tmp_path_factory.mktemp("library")
    environment = os.environ | {"COLUMNS": "400", "PYTHONSAFEPATH": "1"}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    with subprocess.Popen([sys.executable, str(script), str(folder)], **pipes) as process:

        def plant(name: str) -> dict:
            process.stdin.write(name + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield plant
        process.stdin.close()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed(worker, mutant: Mutant):
    report = worker(mutant.name)
    assert report["occurrences"] == 1, f"{mutant.file} has changed: this edit no longer fits it"
    # 1 says that tests ran and failed; an error of collection or of pytest itself has another code.
    assert report["code"] == 1, report["output"]
    for killer in mutant.killers:
        # Failed by its own assertion: a mutant that merely crashes proves little.
        verdict = rf"^FAILED .*{re.escape(killer)} - (AssertionError|assert )"
        assert re.search(verdict, report["output"], re.MULTILINE), report["output"]


def test_names_are_unique():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
