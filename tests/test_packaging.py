"""The wheel, the ``specjax`` command, and how it speaks to somebody who mistypes."""

import dataclasses
import errno
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Literal

import pytest

from specjax.scripts import __main__ as dispatcher
from specjax.scripts import _cli

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy, so that nothing is left behind in the tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for folder in ("specjax", "models", "scripts"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), str(source)]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True)
    return next(out.glob("specjax-*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_every_module_under_one_name(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"specjax"}
    installed = {name for name in names if ".dist-info" not in name}
    tree = {
        str(Path("specjax", "" if folder == "specjax" else folder, file.relative_to(ROOT / folder)))
        for folder in ("specjax", "models", "scripts")
        for file in (ROOT / folder).rglob("*.py")
    }
    assert installed >= tree | {
        "specjax/py.typed",
        "specjax/trace/page.css",
        "specjax/trace/page.js",
    }  # a new folder has to be named in pyproject.toml


@pytest.mark.slow
def test_the_wheel_works_without_the_tree(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        "import specjax.models, specjax.scripts.__main__ as m;"
        "print(specjax.models.__file__); m.main(['--help'])"
    )
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith(f"{tmp_path}/specjax/models/__init__.py\nusage: specjax ")


def test_every_script_has_a_name_a_summary_and_shadows_nothing():
    commands = dispatcher.commands()
    for name, file in commands.items():
        assert not name.startswith(("_", "-"))
        assert dispatcher._summary(file), f"{file.name} needs a docstring: its first line is its help"
        # `python scripts/x.py` puts this folder first on the path.
        assert file.stem not in sys.stdlib_module_names


def test_help_lists_the_commands_and_imports_nothing_heavy():
    program = (
        "import sys; from specjax.scripts.__main__ import main; code = main(['--help']);"
        "print({'jax', 'numpy', 'tyro', 'rich'} & set(sys.modules)); sys.exit(code)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    for name in dispatcher.commands():
        assert f"\n  {name} " in run.stdout
    assert run.stdout.endswith("\nset()\n")


def test_the_command_and_the_file_do_the_same():
    ways = (["-m", "specjax.scripts"], [str(ROOT / "scripts" / "__main__.py")])
    outputs = [subprocess.check_output([sys.executable, *way, "--version"], text=True) for way in ways]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("specjax 0.")


def test_an_unknown_command_gets_one_line(monkeypatch, capsys):
    monkeypatch.setattr(dispatcher, "commands", lambda: dict.fromkeys(("batch", "generate"), Path()))
    assert dispatcher.main(["genrate"]) == 2
    assert capsys.readouterr().err == (
        "specjax: error: unknown command 'genrate', did you mean 'generate'? (commands: batch, generate)\n"
    )
    assert dispatcher.main(["xyz"]) == 2
    assert capsys.readouterr().err == "specjax: error: unknown command 'xyz' (commands: batch, generate)\n"


@dataclasses.dataclass(frozen=True)
class Config:
    """Options to try."""

    num_tokens: int
    """How many."""
    temperature: float = 0.0
    draft: Literal["lookup", "none"] = "lookup"
    stream: bool = False
    slots: int | None = None

    def __post_init__(self):
        if self.num_tokens < 1:
            raise ValueError(f"--num-tokens must be at least 1, got {self.num_tokens}")


def parse(*argv: str) -> Config:
    return _cli.parse(Config, argv, "Tries options.\n\nAnd more.")


def test_a_command_line_becomes_a_config():
    assert parse("--num-tokens", "3", "--temperature", "-1", "--stream") == Config(3, -1.0, "lookup", True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--num-tokens x", "--num-tokens: expected a whole number, got 'x'"),
        ("--num-tokens 3 --temperature hot", "--temperature: expected a number, got 'hot'"),
        ("--num-tokens 3 --slots many", "--slots: expected INT, got 'many'"),
        ("--num-tokens", "Missing value for argument '--num-tokens'. Expected 1 values"),
        ("--num-tokens 3 --tempreature 1", "unknown option --tempreature; did you mean --temperature?"),
        ("--num-tokens 3 --zzz", "unknown option --zzz"),
        ("--num-tokens 3 now", "unexpected argument 'now'"),
        (
            "--num-tokens 3 --draft tree",
            "invalid choice 'tree' for argument '--draft'. Expected one of ('lookup', 'none')",
        ),
        ("--num-tokens 0", "--num-tokens must be at least 1, got 0"),
        ("", "missing: --num-tokens INT How many. (required)"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_broken_option_gets_one_line_that_names_it(argv, message, encoding, monkeypatch, capsys):
    monkeypatch.setattr(type(sys.stdout), "encoding", encoding)  # tyro draws its frames accordingly
    assert _cli.run(lambda _: parse(*argv.split()) and None, command="specjax try") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"specjax try: error: {message} (options: {_cli.command_name(__name__)} --help)\n"


def test_help_shows_the_description_and_the_fields_docstrings(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    assert stop.value.code == 0
    assert "Tries options." in (text := capsys.readouterr().out)
    assert "How many." in text


def test_bad_input_ctrl_c_and_bugs_are_told_apart(capsys, tmp_path):
    def read(_):
        with _cli.blame_input():
            (tmp_path / "missing").read_text()

    def interrupted(_):
        raise KeyboardInterrupt

    def buggy(_):
        raise ValueError("a bug")

    assert _cli.run(read, command="specjax try") == 2
    assert capsys.readouterr().err == f"specjax try: error: {tmp_path}/missing: No such file or directory\n"
    assert _cli.run(interrupted, command="specjax try") == 130
    assert capsys.readouterr().err == "\nspecjax try: interrupted\n"
    with pytest.raises(ValueError, match="a bug"):
        _cli.run(buggy, command="specjax try")


@pytest.mark.parametrize("name", [None, "run.jsonl"])
def test_a_full_disk_is_said_to_be_where_it_is(name, capsys, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device", name)

    monkeypatch.setattr(_cli, "_silence_stdout", lambda: None)
    assert _cli.run(full, command="specjax try") == 1
    said = f"specjax try: error: {name or 'the output'} can't be written: No space left on device\n"
    assert capsys.readouterr().err == said


def test_a_reader_who_goes_away_is_no_error():
    program = "from specjax.scripts import _cli; exit(_cli.run(lambda _: print('x\\n' * 10**6)))"
    command = f'{{ "{sys.executable}" -c "{program}"; echo $? >&2; }} | head -n 1'
    run = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("x\n", "141\n")
