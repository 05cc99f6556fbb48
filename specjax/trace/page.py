"""A trace as one HTML file that needs nothing else: open it from disk, attach it to a mail.

All text in it comes from models and users and is shown as text: it is escaped; what can't be seen (control
and formatting characters, right-to-left overrides among them) is spelt out; and the page's own content
security policy allows the one style and the one script in it, by their hashes, and no resource at all.
"""

from __future__ import annotations

import base64
import codecs
import hashlib
import html
import importlib.resources
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from specjax.record import Source
from specjax.trace.steps import Choice, Step, Trace

__all__ = ["pieces", "render"]

TokenBytes = Callable[[int], bytes]

_NAMES = {
    Source.ACCEPTED: "drafted and accepted",
    Source.CORRECTED: "corrected after a rejection",
    Source.BONUS: "bonus after a whole draft",
    Source.PLAIN: "plain, nothing was drafted",
}
# Seen by their effect, needed to write some languages, and harmless.
_JOINERS = "\u200c\u200d"


def render(trace: Trace, token_bytes: TokenBytes, *, title: str = "specjax trace") -> str:
    """Makes the page.

    Args:
      trace: from :func:`specjax.trace.trace`.
      token_bytes: gives the UTF-8 bytes that a token stands for, which may end inside a character.
      title: of the page, any text.

    Returns:
      A whole HTML document.
    """
    folder = importlib.resources.files("specjax.trace")
    style, script = ((folder / name).read_text("utf-8") for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
        f"<title>{_escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n",
        f"<h1>{_escape(title)}</h1>\n",
        *_summary(trace),
        '<input type="checkbox" id="rejected"><label for="rejected">show rejected proposals</label>\n',
        '<input type="checkbox" id="prompt"><label for="prompt">show the prompt</label>\n',
        '<main dir="auto" tabindex="0"><span class="prompt">',
        *map(_mark_up, pieces(trace.prompt, token_bytes)),
        "</span>",
        *_steps(trace, token_bytes),
        "</main>\n",
        '<aside aria-live="polite">Point at a token; or click one, and use the arrow keys.</aside>\n',
        '<script type="application/json" id="told">',
        _json(_told(trace, token_bytes)),
        f"</script>\n<script>{script}</script>\n</body>\n</html>\n",
    ]
    return "".join(parts)


def pieces(tokens: Iterable[int], token_bytes: TokenBytes) -> Iterator[str]:
    """The text of each token, one for each: together they are the whole text.

    A character whose bytes straddle tokens belongs to the last of them; those before it get an empty string.
    Bytes that form no character become U+FFFD, at the end of the text if it ends inside one.

    Args:
      tokens: ids.
      token_bytes: as for :func:`render`.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    held: str | None = None  # the last token may get what is left over
    for token in tokens:
        if held is not None:
            yield held
        held = decoder.decode(token_bytes(int(token)))
    if held is not None:
        yield held + decoder.decode(b"", final=True)


def _steps(trace: Trace, token_bytes: TokenBytes) -> Iterator[str]:
    """The text, one element a step, one a token in it; rejected proposals stand before the last."""
    texts = pieces(trace.generation.tokens, token_bytes)
    for number, step in enumerate(trace.steps):
        yield f'<span class="step" data-n="{number}">'
        shown = [
            f'<span class="{source.name.lower()}">{_mark_up(text) or _bytes(token_bytes(token))}</span>'
            for token, source, text in zip(step.tokens, step.sources, texts, strict=False)
        ]
        rejected = [
            f'<s class="rejected">{_mark_up(_alone(p.token, token_bytes), breaks=False)}</s>'
            for p in step.proposals
            if not p.stood
        ]
        kept = sum(p.stood for p in step.proposals)
        yield "".join([*shown[:kept], *rejected, *shown[kept:]])
        yield "</span>"


def _summary(trace: Trace) -> Iterator[str]:
    """A bar of where the tokens came from, what its colours mean, and the usual figures."""
    generation = trace.generation
    total = max(len(generation.tokens), 1)
    left = 0.0
    yield '<svg class="bar" role="img" aria-label="where the tokens came from" height="18" width="100%">'
    for source in _NAMES:
        width = 100 * generation.sources.count(source) / total
        if width:
            yield f'<rect class="{source.name.lower()}" x="{left:.3f}%" width="{width:.3f}%" height="18"/>'
        left += width
    yield '</svg>\n<ul class="legend">'
    for source, name in _NAMES.items():
        yield f'<li><span class="{source.name.lower()}">{generation.sources.count(source)}</span> {name}</li>'
    yield (
        f"</ul>\n<p>{len(generation.tokens)} tokens in {generation.num_steps} steps, "
        f"{generation.mean_acceptance_length:.2f} a step; {generation.num_accepted_tokens} of "
        f"{generation.num_draft_tokens} drafted tokens accepted, {generation.draft_acceptance_rate:.0%}. "
        f"{'It ended with a stop token.' if generation.stopped else ''}"
        f"{'The logits stopped being numbers.' if generation.failed else ''}</p>\n"
    )


def _told(trace: Trace, token_bytes: TokenBytes) -> dict[str, Any]:
    """What the script shows on demand: steps in short keys, and the texts of all tokens in them by id."""
    seen: set[int] = set()

    def choices(of: list[Choice]) -> list[list[float | None]]:
        seen.update(token for token, _ in of)
        return [[token, _short(chance)] for token, chance in of]

    def told(step: Step) -> dict[str, Any]:
        seen.update(step.tokens, (p.token for p in step.proposals))
        return {
            "start": step.start,
            "tokens": step.tokens,
            "sources": [_NAMES[source] for source in step.sources],
            "probs": [_short(p) for p in step.probs],
            "proposals": [
                {
                    "token": p.token,
                    "stood": p.stood,
                    "p": _short(p.target_prob),
                    "q": _short(p.draft_prob),
                    "accept": _short(p.accept_prob),
                    "u": None if p.uniform is None else _short(p.uniform),
                    "target": choices(p.target_choices),
                    "draft": choices(p.draft_choices),
                }
                for p in step.proposals
            ],
            "next": choices(step.next_choices),
            "target": choices(step.target_choices),
        }

    steps = [told(step) for step in trace.steps]
    return {"steps": steps, "texts": {token: _alone(token, token_bytes) for token in sorted(seen)}}


def _short(number: float) -> float | None:
    """Six digits; a NaN, which JSON hasn't got, is nothing."""
    return float(f"{number:.6g}") if number == number else None


def _alone(token: int, token_bytes: TokenBytes) -> str:
    """A token's text out of context, or its bytes in hexadecimal where they are no whole characters."""
    data = token_bytes(token)
    try:
        return data.decode() or f"token {token}"
    except UnicodeDecodeError:
        return data.hex(" ").upper()


def _hidden(character: str) -> bool:
    """Whether it leaves no ink of its own: controls, formats, private and unassigned ones, odd line ends."""
    if character in _JOINERS:
        return False
    return unicodedata.category(character).startswith("C") or character in "\u2028\u2029"


def _mark_up(text: str, *, breaks: bool = True) -> str:
    """Text as HTML: escaped, with a name for what can't be seen; line breaks break the line, or only show."""
    parts = []
    for character in text:
        if character in "\n\t":
            parts.append(f"<i>{'↵' if character == chr(10) else '⇥'}</i>{character if breaks else ''}")
        elif _hidden(character):
            parts.append(f"<i>U+{ord(character):04X}</i>")
        else:
            parts.append(html.escape(character))
    return "".join(parts)


def _bytes(data: bytes) -> str:
    """What stands for a token without text of its own: part of a character, or a special token."""
    return f"<i>{data.hex(' ').upper() or '∅'}</i>"


def _escape(text: str) -> str:
    """Text on one line where there is no markup."""
    return html.escape("".join(" " if _hidden(character) else character for character in text))


def _json(value: Any) -> str:
    """JSON that can't end the element it stands in, and no line of it a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
