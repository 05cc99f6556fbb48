"""The page shows text as text, whatever the text is, and opens without a complaint."""

from __future__ import annotations

import functools
import html
import html.parser
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from specjax.record import Generation, Source
from specjax.trace import Proposal, Step, Trace, pieces, render

P, A, C, B = Source.PLAIN, Source.ACCEPTED, Source.CORRECTED, Source.BONUS

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<!--<script>",
    "]]><img src=x onerror=alert(3)>",
    "&lt;b&gt; &amp;",
    "\"'`><svg/onload=alert(4)>",
    "\u202eevil\u202c",
    "\u2066isolated\u2069",
    "\u200fmark\u200e\u061c",
    "\x00\x07\x1b[31mred\x7f",
    "\u2028\u2029\ufeff\u200b\u00ad",
    "line one\n\tline two\r\n",
    "שלום عربي हिन्दी 日本語 👩\u200d👧",
    "e\u0301" + "\u0301" * 50,
    "javascript:alert(5)",
    "\ue000\U000e0041",
]


def make_trace(texts, rejected="dog", kinds=(A, A, C)):
    """A trace whose token i stands for ``texts[i]``, in steps of three, each with one more proposal."""
    steps, tokens, sources = [], [], []
    extra = len(texts)
    for begin in range(0, len(texts), len(kinds)):
        block = list(range(begin, min(begin + len(kinds), len(texts))))
        choices = [(token, 1 / (2 + token)) for token in block]
        heard = [
            Proposal(token, i < len(block) - 1, 0.25, 0.5, 0.5, 0.125 * (i + 1), choices, choices)
            for i, token in enumerate([*block[:-1], extra])
        ]
        step_sources = [*kinds[: len(block) - 1], C]
        steps.append(Step(begin + 1, heard, block, step_sources, [0.5] * len(block), choices, choices))
        tokens += block
        sources += step_sources
    generation = Generation(
        tokens=tokens,
        sources=sources,
        stopped=True,
        failed=False,
        num_steps=len(steps),
        drafted=np.array([0, 0, 0, len(steps)]),
        accepted=np.array([0, 0, len(steps), 0]),
    )
    table = [text.encode() for text in [*texts, rejected]]
    return Trace([0], generation, steps), table.__getitem__


class Page(html.parser.HTMLParser):
    """What a browser would see: elements, attributes, and the text in the main part."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.attributes, self.text, self.data, self.path = [], [], "", {}, []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "input", "br"):
            self.path.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.path.pop()[0] == tag

    def handle_data(self, data):
        names = [tag for tag, _ in self.path]
        rejected = "s" in names or any(attrs.get("class") == "prompt" for _, attrs in self.path)
        if "main" in names and not rejected:
            self.text += data
        if names and names[-1] == "script":
            self.data[self.path[-1][1].get("id")] = data


@functools.cache
def hostile_page():
    return render(*make_trace(HOSTILE, rejected=HOSTILE[0]), title=HOSTILE[1] + HOSTILE[6])


def test_hostile_text_is_text():
    page = Page(hostile_page())
    assert page.path == []  # every element is closed where it should be
    allowed = {"html", "head", "meta", "title", "style", "body", "h1", "svg", "rect", "ul", "li", "span", "p"}
    assert set(page.elements) == allowed | {"input", "label", "main", "aside", "i", "s", "script"}
    assert page.elements.count("script") == 2
    names = {name for name, _ in page.attributes}
    assert not [name for name in names if name.startswith("on") or name in ("src", "href", "style")]
    for text in (HOSTILE[0], HOSTILE[3], HOSTILE[4], HOSTILE[5], HOSTILE[12], HOSTILE[13]):
        assert text in page.text


def test_what_cannot_be_seen_is_spelt_out():
    page = hostile_page()
    text = Page(page).text
    assert "U+202EevilU+202C" in text
    assert "U+0000U+0007U+001B[31mredU+007F" in text
    assert "U+2028U+2029U+FEFFU+200BU+00AD" in text
    assert "U+E000U+E0041" in text
    assert "line one↵\n⇥\tline twoU+000D↵\n" in text
    body = re.sub(r"(?s)<style>.*?</style>|<script.*?</script>", "", page)
    assert not re.search(
        "[\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c\u2028\u2029\x00-\x08\x0b-\x1f\x7f]", body
    )


def test_the_told_json_is_whole_and_cannot_end_its_element():
    raw = Page(hostile_page()).data["told"]
    assert not re.search(r"[<>&\u2028\u2029]|[^\x00-\x7f]", raw)
    told = json.loads(raw)
    assert [told["texts"][str(i)] for i in range(len(HOSTILE))] == HOSTILE
    assert len(told["steps"]) == 6
    first = told["steps"][0]
    assert first["proposals"][0] | {"target": 0, "draft": 0} == {
        "token": 0,
        "stood": True,
        "p": 0.25,
        "q": 0.5,
        "accept": 0.5,
        "u": 0.125,
        "target": 0,
        "draft": 0,
    }
    assert first["next"] == [[0, 0.5], [1, 0.333333], [2, 0.25]]


def test_the_policy_allows_its_own_blocks_alone():
    page = hostile_page()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert not re.search(r"(?i)https?://(?!www\.w3\.org/2000/svg)|@import|url\(", page)


def test_pieces_add_up_to_the_text_and_characters_may_straddle_tokens():
    data = "a€👍é".encode()
    for size in (1, 2, 3, 5):
        table = [data[i : i + size] for i in range(0, len(data), size)]
        found = list(pieces(range(len(table)), table.__getitem__))
        assert len(found) == len(table)
        assert "".join(found) == data.decode()
    torn = [b"\xe2", b"\x82"]
    assert list(pieces([0, 1], torn.__getitem__)) == ["", "\ufffd"]
    assert list(pieces([0, 1], [b"\xe2", b"x"].__getitem__)) == ["", "\ufffdx"]
    assert list(pieces([], torn.__getitem__)) == []


def test_tokens_without_text_of_their_own_show_their_bytes():
    trace, _ = make_trace(["€", "x", "y", "z"])
    table = [b"\xe2", b"\x82\xac", b"", b"z", b"dog"]
    text = Page(render(trace, table.__getitem__)).text
    assert text == "E2€∅z"


def test_counts_and_shares_of_the_summary():
    page = render(*make_trace(["a"] * 9))
    assert (
        "9 tokens in 3 steps, 3.00 a step; 6 of 9 drafted tokens accepted, 67%. It ended with a stop" in page
    )
    assert page.count('<s class="rejected">dog</s><span class="corrected">a</span></span>') == 3
    assert page.count("<s ") == 3
    widths = re.findall(r'<rect class="(\w+)" x="([\d.]+)%" width="([\d.]+)%"', page)
    assert widths == [("accepted", "0.000", "66.667"), ("corrected", "66.667", "33.333")]


def browser():
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium here")
    return found


FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=3000",
)

# Runs in the page after it: points at every token and writes down what the panel says.
PROBE = """
const spans = [...document.querySelectorAll(".step > *")], said = [];
for (let i = 0; i < spans.length; i += STRIDE) {
  const span = spans[i];
  span.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
  said.push(document.querySelector("aside").textContent);
}
const key = new KeyboardEvent("keydown", { key: "ArrowLeft", bubbles: true });
document.querySelector("main").dispatchEvent(key);
said.push(document.querySelector("aside").textContent);
const landed = document.querySelector(".chosen").offsetParent !== null;
const shown = (s) => getComputedStyle(document.querySelector(s)).display;
const hidden = shown("s.rejected");
document.querySelector("#rejected").click();
document.documentElement.dataset.probe = JSON.stringify({
  said, hidden, landed, seen: shown("s.rejected"),
  scripts: document.scripts.length, images: document.images.length,
  inner: document.querySelectorAll("aside script, aside img, aside svg[onload]").length,
});
"""


def open_page(page, folder):
    """The page's DOM after its script has run, and what the browser complained about."""
    path = folder / "trace.html"
    path.write_text(page, encoding="utf-8")
    command = [browser(), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def probed(page, stride=1):
    """The same page, with the probe as a part of its own script."""
    from specjax.trace.page import _hash

    (script,) = re.findall(r"(?s)</script>\n<script>(.*)</script>", page)
    longer = script + PROBE.replace("STRIDE", str(stride))
    return page.replace(script, longer).replace(_hash(script), _hash(longer))


@pytest.mark.slow
def test_chromium_opens_it_without_a_complaint(tmp_path):
    dom, complaints = open_page(probed(hostile_page()), tmp_path)
    assert complaints == []
    probe = json.loads(html.unescape(re.search(r'data-probe="([^"]*)"', dom)[1]))
    assert (probe["hidden"], probe["seen"]) == ("none", "inline")
    assert probe["landed"]  # the arrow key went past the rejected ones, which are hidden
    assert (probe["scripts"], probe["images"], probe["inner"]) == (2, 0, 0)
    assert len(probe["said"]) == len(HOSTILE) + 6 + 1  # a rejected one a step, and the key's
    assert probe["said"][-1] != probe["said"][-2]
    assert "<script>alert(1)</script> (token 0) proposal 1 of 3: drafted and accepted" in probe["said"][0]
    assert "target p = 0.250, draft q = 0.500" in probe["said"][0]
    assert "draw u = 0.125 < 0.500" in probe["said"][0]
    assert "proposal 3 of 3: rejected" in probe["said"][2]
    assert "corrected after a rejection" in probe["said"][3]
    assert "U+202E" in "".join(probe["said"])


@pytest.mark.slow
def test_a_fault_in_the_page_would_be_seen(tmp_path):
    inline = hostile_page().replace("<h1>", '<h1 style="color: red">')
    _, complaints = open_page(inline, tmp_path)
    assert any("Content Security Policy" in line for line in complaints)


@pytest.mark.slow
def test_ten_thousand_tokens_stay_usable(tmp_path):
    page = render(*make_trace([f" word{i}" for i in range(10_000)]))
    assert len(page) < 8e6
    dom, complaints = open_page(probed(page, stride=101), tmp_path)
    assert complaints == []
    probe = json.loads(html.unescape(re.search(r'data-probe="([^"]*)"', dom)[1]))
    assert len(probe["said"]) == -(-(10_000 + 3334) // 101) + 1
    assert "word0 " in probe["said"][0]
    assert len(set(probe["said"])) == len(probe["said"])
