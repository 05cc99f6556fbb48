"""`specjax generate --trace`: the same text, a page beside it, colours on a terminal alone."""

from __future__ import annotations

import sys

import pytest

from specjax.models.tokenizer import Detokenizer, Tokenizer
from specjax.record import Source
from specjax.scripts import __main__ as specjax_command
from specjax.scripts import _colours


def run(*argv):
    return specjax_command.main([str(x) for x in argv])


def test_a_trace_is_written_and_changes_no_character(write_gguf, tmp_path, capsys):
    model, page = write_gguf(), tmp_path / "trace.html"
    plain = ["generate", "the hehehe", "--model", model, "--max-tokens", 24]
    traced = [*plain, "--trace", page]
    assert run(*plain) == 0
    expected = capsys.readouterr().out
    assert run(*traced) == 0
    assert capsys.readouterr().out == expected
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert "24 tokens in " in page.read_text("utf-8")
    page.write_text("precious")
    assert run(*traced) == 2
    assert page.read_text() == "precious"
    assert "is there already: move it away, or give --overwrite" in capsys.readouterr().err
    assert run(*traced, "--overwrite") == 0
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trace", "no/such/folder/t.html"], "no/such/folder is no folder"),
        (["--trace", "t.html", "--stream"], "--trace and --stream exclude each other"),
    ],
)
def test_what_cannot_be_traced_is_said_before_anything_is_loaded(options, message, capsys):
    assert run("generate", "hello", "--model", "missing.gguf", *options) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_a_terminal_is_shown_escape_sequences_and_does_not_obey_them():
    texts = ["a\x1b[2J\x07\x9b2J", "b\n\t\x7f\u202eturned\u2069"]
    text = _colours.coloured(texts, [Source.ACCEPTED, Source.BONUS])
    assert text.plain == "a␛[2J␇\ufffd2Jb\n\t␡\ufffdturned\ufffd"
    assert [str(span.style) for span in text.spans] == ["bold green", "cyan"]


@pytest.mark.parametrize("options", [[], ["--stream"]])
def test_a_plain_text_is_as_harmless_on_a_terminal_and_untouched_elsewhere(
    options, write_gguf, monkeypatch, capsys
):
    monkeypatch.setattr(Tokenizer, "decode", lambda *args, **kwargs: "a\x1b[2J")
    monkeypatch.setattr(Detokenizer, "feed", lambda self, ids: "")
    monkeypatch.setattr(Detokenizer, "finish", lambda self: "a\x1b[2J")
    words = ["generate", "the he", "--model", write_gguf(), "--max-tokens", 2, *options]
    assert run(*words) == 0
    assert capsys.readouterr().out == "a\x1b[2J\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run(*words) == 0
    assert capsys.readouterr().out == "a␛[2J\n"
