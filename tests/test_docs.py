"""Every command and code block of the README and of docs/ is run, on tiny models in place of real ones."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from specjax.engine.requests import parse_request
from specjax.models import load
from specjax.scripts import __main__ as specjax_command
from specjax.scripts import _jobs

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# What is added to a command so that it takes seconds: fewer prompts, tokens, draws and runs.
SHORTER = {
    "generate": ["--max-tokens", "8"],
    "spec-bench": ["--per-task", "1", "--max-tokens", "8"],
    "batch": ["--max-tokens", "8", "--slots", "4", "--capacity", "256"],
    "audit": ["--num-prompts", "2", "--max-tokens", "8", "--batch-size", "2", "--checks", "greedy"],
    "distill": [
        *["--prompts", "given.jsonl", "--num-tokens", "1", "--capacity", "64", "--scored", "100"],
        *["--batch", "2", "--steps", "2", "--passes", "1", "--held-out", "0.3", "--per-task", "0"],
    ],
    "bench": ["--per-task", "1", "--runs", "1", "--max-tokens", "24"],
    # Whole models take minutes to compile, and the TPU's compiler must be there.
    "plan": [
        "--target",
        "target.gguf",
        "--draft",
        "draft.gguf",
        "--topology",
        "v5e:2x2",
        "--capacity",
        "512",
        "--live",
        "512",
    ],
    "bench-distill": ["--capacity", "64", "--batch", "2", "--scored", "100", "--runs", "1"],
    "bench-rule": ["--vocab-size", "64", "--batch-size", "2", "--runs", "1"],
}


RUN: set[str] = set()


def blocks(page):
    """The fenced blocks of a page: (language, text)."""
    return re.findall(r"(?ms)^```(\w*)\n(.*?)^```$", page.read_text("utf-8"))


def commands():
    """Every line of every shell block without its comment, and the page that it stands on."""
    for page in PAGES:
        lines = [line for kind, text in blocks(page) if kind == "sh" for line in text.splitlines()]
        commands = (line.split(" #")[0].strip() for line in lines if not line.startswith("#"))
        yield from ((page.name, command) for command in commands if command)


def test_every_block_is_of_a_kind_that_is_run_here():
    kinds = {kind for page in PAGES for kind, _ in blocks(page)}
    assert kinds <= {"sh", "python", "json", ""}
    for page in PAGES:
        for kind, text in blocks(page):
            if kind == "":
                assert "specjax/" in text, f"{page.name}: only the tree of files needs no language"


@pytest.fixture
def house(write_gguf, tiny_weights, tmp_path, monkeypatch):
    """A folder with the models that the docs name, where prompts are short and smollm2 is tiny."""
    weights = {name: x for name, x in tiny_weights().items() if not name.startswith("blk.1.")}
    for name in ("smollm2", "target", "draft"):
        sizes = {"llama.context_length": 512, "llama.block_count": 1}
        write_gguf(weights, name=f"{name}.gguf", metadata=sizes)
    (tmp_path / "given.jsonl").write_text("".join(f'{{"prompt": "he {i}"}}\n' for i in range(20)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load, "smollm2_path", lambda: tmp_path / "smollm2.gguf")
    whole = _jobs.spec_bench

    def short(*args, **options):
        rows = whole(*args, **options)
        for row in rows:
            row["messages"][0]["content"] = row["messages"][0]["content"][:40]
        return rows

    monkeypatch.setattr(_jobs, "spec_bench", short)
    return tmp_path


def run_command(words, source, sink):
    """Runs one command of a line; a tuple of words, its standard input and where its output goes."""
    name, *rest = words
    if name == "echo":
        sink.write(" ".join(rest) + "\n")
    elif name == "make":
        subprocess.run(["make", "-n", "-C", str(ROOT), *rest], check=True, capture_output=True)
    elif name == "pip":
        check_pip(rest)
    elif name == "python":
        script = ROOT / rest[0]
        assert script.exists()
    else:
        assert name == "specjax", f"{name!r} is nothing that the docs may use"
        job, options = rest[0], list(rest[1:])
        if job in ("generate", "audit", "bench", "batch") and "--model" not in options:
            options += ["--model", "smollm2.gguf"]
        if job == "plan" and importlib.util.find_spec("libtpu") is None:
            options += ["--rows", "0"]  # refused once all is read
            with contextlib.redirect_stderr(io.StringIO()) as said:
                assert specjax_command.main([job, *options]) == 2
            assert "--rows and --num-speculative-tokens must be" in said.getvalue()
            return
        with contextlib.redirect_stdout(sink), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdin", source)
            assert specjax_command.main([job, *options, *SHORTER.get(job, [])]) == 0


def check_pip(words):
    """pip would install something that pyproject.toml names."""
    assert words[0] == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {
        re.match(r"[\w-]+", one)[0] for extra in project["optional-dependencies"].values() for one in extra
    }
    for word in words[1:]:
        extras = re.fullmatch(r"\.\[(.*)\]|specjax\[(.*)\]", word)
        if extras:
            assert set((extras[1] or extras[2]).split(",")) <= set(project["optional-dependencies"])
        elif not word.startswith("-") and word != ".":
            assert word in known


def run_line(line, folder):
    """Runs one line of a shell block: commands joined by && or |, output into a file by >."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&>")
    lexer.whitespace_split = True
    source, sink, words = io.StringIO(), io.StringIO(), []
    tokens = [*lexer, "&&"]
    while tokens:
        token = tokens.pop(0)
        if token == ">":
            path = tokens.pop(0)
            run_command(words, source, sink)
            (folder / path).write_text(sink.getvalue(), "utf-8")
            words = []
        elif token in ("|", "&&"):
            if words:
                run_command(words, source, sink)
            source, sink, words = (sink if token == "|" else io.StringIO()), io.StringIO(), []
            source.seek(0)
        else:
            words.append(token)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_runs(page, house, capsys):
    for name, line in commands():
        # What takes longest is run on one page only; nothing else reads what it leaves.
        known = line.startswith(("specjax audit", "specjax bench")) and line in RUN
        if name == page.name and not known:
            run_line(line, house)
            RUN.add(line)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_runs(page, house, capsys):
    names: dict[str, object] = {}
    for kind, text in blocks(page):
        if kind == "python":
            exec(compile(text, f"{page.name}", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_json_line_is_a_request(page):
    for kind, text in blocks(page):
        if kind == "json":
            for line in text.splitlines():
                assert parse_request(line, name="line-1", model="smollm2")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_table_has_a_head_and_rows_of_its_width(page):
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text("utf-8"))
    for table in re.findall(r"(?m)(?:^\|.*\n)+", text):
        head, rule, *rows = table.splitlines()
        assert re.fullmatch(r"\|(-+\|)+", rule), f"{page.name}: no head over {head}"
        assert {line.count("|") for line in (head, *rows)} == {rule.count("|")}, f"{page.name}: {head}"
        named = [row.split("|")[1].strip() for row in rows if row.startswith("| `--")]
        assert len(named) == len(set(named)), f"{page.name}: an option stands twice"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text("utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"", text):
        path, _, section = "".join(link).partition("#")
        if path.startswith("http"):
            continue
        target = (page.parent / path) if path else page
        assert target.exists(), f"{page.name} links to {path}"
        if section and target.suffix == ".md":
            titles = re.findall(r"(?m)^#+ (.*)$", target.read_text("utf-8"))
            slugs = {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}
            assert section in slugs, f"{page.name} links to #{section}"


OPTION = re.compile(r"`(--[a-z][\w-]*)`")


def options_of(job, capsys):
    """What the job's own help names."""
    with contextlib.suppress(SystemExit):
        specjax_command.main([job, "--help"])
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) - {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_need_other_machines_have_options_that_exist(page, capsys):
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text("utf-8"))
    for job, rest in re.findall(r"(?m)^    .*?specjax ([a-z][\w-]*)(.*)$", text):
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", rest))
        assert named <= options_of(job, capsys), f"{page.name}: specjax {job}{rest}"


@pytest.mark.parametrize("job", ["generate", "batch", "distill", "audit", "bench", "plan"])
def test_a_jobs_page_has_its_options_and_no_other(job, capsys):
    known = options_of(job, capsys)
    known = {option for option in known if not option.startswith("--no-")}
    named = set(OPTION.findall((ROOT / "docs" / f"{job}.md").read_text("utf-8")))
    named = {option for option in named if not option.startswith("--no-")}
    shared = (
        set()
        if job in ("generate", "plan")
        else set(OPTION.findall((ROOT / "docs/generate.md").read_text("utf-8")))
    )
    assert named - known == set(), "options that the job hasn't got"
    assert known - named - shared == set(), "options that the page leaves out"


@pytest.mark.slow
def test_the_reference_has_a_page_for_every_room(tmp_path):
    pytest.importorskip("pdoc")
    recipe = re.search(r"\$\(BIN\)/pdoc (.*)", (ROOT / "Makefile").read_text())[1]
    words = recipe.replace("build/docs", str(tmp_path)).split()
    subprocess.run([sys.executable, "-m", "pdoc", *words], check=True, cwd=ROOT, capture_output=True)
    for file in (ROOT / "specjax").glob("[!_]*"):  # what a package's own page tells has no page of its own
        if file.suffix == ".py" or (file / "__init__.py").exists():
            assert (tmp_path / "specjax" / file.with_suffix(".html").name).exists()
    assert "Accepts d_i while" in (tmp_path / "specjax" / "verify.html").read_text()
