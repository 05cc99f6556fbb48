"""Text in the terminal, coloured by where each token came from."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from specjax.record import Source

__all__ = ["coloured", "harmless", "legend"]

_STYLES = {
    Source.PLAIN: "default",
    Source.ACCEPTED: "bold green",
    Source.CORRECTED: "yellow",
    Source.BONUS: "cyan",
}
# A model's text may carry escape sequences; on a terminal they are shown, not obeyed. Some begin with one
# character above 0x7F, and others turn the text around: these have no picture of their own.
_CONTROLS = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys((*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),
}


def harmless(text: str) -> str:
    """What a model wrote, so that a terminal shows its control characters and doesn't obey them."""
    return text.translate(_CONTROLS)


def coloured(texts: Sequence[str], sources: Sequence[Source]) -> Text:
    """Each token's text in the style of its source."""
    text = Text()
    for piece, source in zip(texts, sources, strict=True):
        text.append(harmless(piece), _STYLES[source])
    return text


def legend() -> Text:
    """What the styles mean, in one line."""
    return Text.assemble(
        "each token: ",
        ("drafted and accepted", _STYLES[Source.ACCEPTED]),
        ", ",
        ("corrected after a rejection", _STYLES[Source.CORRECTED]),
        ", ",
        ("bonus after a whole draft", _STYLES[Source.BONUS]),
        ", plain (nothing was drafted)",
    )
