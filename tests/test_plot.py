"""The figures: nothing clipped, nothing on top of another label, colours that everybody can tell apart."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")

from matplotlib.colors import to_rgb  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.text import Text  # noqa: E402

from specjax import plot  # noqa: E402
from specjax.plot.style import _DARK, _LIGHT  # noqa: E402

TOKENS = ["mat", "sofa", "floor", "roof", "dog", "moon"]
P = np.array([0.34, 0.22, 0.16, 0.14, 0.10, 0.04])
Q = np.array([0.20, 0.36, 0.22, 0.06, 0.14, 0.02])
ACCEPTED, LEFT = np.minimum(P, Q), np.maximum(P - Q, 0)
KS = np.arange(9)

DRAWINGS = {
    "distributions": lambda axis: plot.distributions(axis, P, Q, TOKENS),
    "over_and_under": lambda axis: plot.over_and_under(axis, P, Q, TOKENS),
    "acceptance_rule": lambda axis: plot.acceptance_rule(axis, Q, np.minimum(1, P / Q), TOKENS),
    "rescaled": lambda axis: plot.rescaled(axis, LEFT, LEFT / LEFT.sum(), TOKENS),
    "stacked": lambda axis: plot.stacked(axis, ACCEPTED, LEFT, P, TOKENS, draft=Q),
    "counts_by_token": lambda axis: plot.counts_by_token(axis, ACCEPTED * 2000, LEFT * 2000, P, TOKENS),
    "whole_step": lambda axis: plot.whole_step(axis, ACCEPTED, LEFT, TOKENS),
    "lines": lambda axis: plot.lines(axis, KS, {"a": KS, "b": KS**2}, markers=True),
    "expected_and_measured": lambda axis: plot.expected_and_measured(
        axis,
        KS,
        {"token": KS + 1, "block": KS + 2},
        [1, 4],
        {"token": [2, 5], "block": [3, 6]},
        {"token": [0.1, 0.1], "block": [0.1, 0.1]},
    ),
    "speedups": lambda axis: plot.speedups(axis, KS, {"c = 0.1": 1 + KS * (6 - KS) / 9}),
    "throughput": lambda axis: plot.throughput(axis, [0, 1, 2.5, 3], [0, 100, 300, 310]),
    "acceptance_by_position": lambda axis: plot.acceptance_by_position(axis, [0.8, 0.6, np.nan]),
    "acceptance_histogram": lambda axis: plot.acceptance_histogram(axis, [10, 5, 30]),
    "planned_throughput": lambda axis: plot.planned_throughput(
        axis, [0.5, 0.9], {"8 rows": [100, 250]}, {"8 rows": 90}
    ),
    "learning_curves": lambda axis: plot.learning_curves(
        axis,
        [
            {"step": 10, "acceptance": [0.1, 0.05]},
            {"step": 20, "acceptance": [0.3, 0.2]},
            {"step": 20, "held_out": {"acceptance_T0_1": 0.35, "acceptance_T1_1": 0.25}},
        ],
    ),
    "drafted_tokens": lambda axis: plot.drafted_tokens(axis, [0, 1, 2], [3, 0, 5]),
}


@functools.cache
def draw(name, theme="light", size=(4.5, 3)):
    with matplotlib.rc_context(plot.style(theme)):
        figure = Figure(figsize=size)
        axis = figure.subplots()
        DRAWINGS[name](axis)
        figure.draw_without_rendering()
    return figure, axis


def test_every_figure_is_drawn_here():
    helpers = {"Palette", "palette", "save", "sliders", "style", "svg"}
    assert set(DRAWINGS) == set(plot.__all__) - helpers


@pytest.mark.parametrize("name", DRAWINGS)
def test_no_label_is_clipped_or_covered(name):
    figure, axis = draw(name, "dark")
    # Labels of ticks beyond the axis are there, but not drawn.
    unseen = {
        tick.label1
        for line, (low, high) in (
            (axis.xaxis, sorted(axis.get_xlim())),
            (axis.yaxis, sorted(axis.get_ylim())),
        )
        for tick in line.get_major_ticks()
        if not low - 1e-9 <= tick.get_loc() <= high + 1e-9
    }
    boxes = {
        text: text.get_window_extent()
        for text in figure.findobj(Text)
        if text.get_text() and text.get_visible() and text not in unseen
    }
    assert len(boxes) > 4
    page = figure.bbox
    for text, box in boxes.items():
        inside = page.x0 - 1 <= box.x0 and box.x1 <= page.x1 + 1 and page.y0 - 1 <= box.y0
        assert inside and box.y1 <= page.y1 + 1, f"{text.get_text()!r} is clipped"  # noqa: PT018
    ticks = [label for label in axis.get_xticklabels() if label in boxes]
    for a, b in itertools.pairwise(sorted(ticks, key=lambda label: boxes[label].x0)):
        assert boxes[a].x1 <= boxes[b].x0, f"{a.get_text()!r} runs into {b.get_text()!r}"
    named = [text for text in axis.texts if text in boxes]
    for a, b in itertools.combinations(named, 2):
        assert not boxes[a].overlaps(boxes[b]), f"{a.get_text()!r} lies on {b.get_text()!r}"


@pytest.mark.parametrize("draw_bars", [plot.distributions, plot.whole_step])
def test_a_token_is_text_and_no_formula(draw_bars):
    figure = Figure()
    axis = figure.subplots()
    draw_bars(axis, [0.5, 0.5], [0.0, 0.0], ["$x$", "$\\unknown{$"])
    figure.draw_without_rendering()  # what isn't a formula would fail here
    names = [text for text in figure.findobj(Text) if text.get_text().startswith("$")]
    assert {text.get_text()[:2] for text in names} == {"$x", "$\\"}
    assert not any(text.get_parse_math() for text in names)


@pytest.mark.parametrize("name", DRAWINGS)
def test_colours_follow_the_page(name):
    for theme, colours, other in (("light", _LIGHT, _DARK), ("dark", _DARK, _LIGHT)):
        figure, axis = draw(name, theme)
        assert to_rgb(figure.get_facecolor()) == to_rgb(colours.paper)
        inks = {to_rgb(text.get_color()) for text in figure.findobj(Text)}
        assert inks == {to_rgb(colours.ink)}
        drawn = {to_rgb(patch.get_facecolor()) for patch in axis.patches}
        assert not drawn & {to_rgb(other.target), to_rgb(other.accepted), to_rgb(other.resampled)}


def lightness(colour):
    """Relative luminance, WCAG 2."""
    channels = np.asarray(to_rgb(colour))
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4) @ [
        0.2126,
        0.7152,
        0.0722,
    ]


# Linear RGB as dichromats see it: Viénot, Brettel and Mollon 1999, for protanopes and deuteranopes.
SIGHTS = {
    "trichromat": np.eye(3),
    "protanope": np.array([[0.1124, 0.8876, 0], [0.1124, 0.8876, 0], [0.004, -0.004, 1]]),
    "deuteranope": np.array([[0.2928, 0.7072, 0], [0.2928, 0.7072, 0], [-0.0223, 0.0223, 1]]),
}


def seen(colour, sight):
    channels = np.asarray(to_rgb(colour))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    linear = np.clip(sight @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    x, y, z = np.cbrt(np.maximum(xyz / [0.9505, 1, 1.089], 1e-6))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])  # CIELAB


@pytest.mark.parametrize("colours", [_LIGHT, _DARK], ids=["light", "dark"])
@pytest.mark.parametrize("sight", SIGHTS)
def test_what_meets_in_a_figure_can_be_told_apart(colours, sight):
    meeting = [
        (colours.target, colours.draft),
        (colours.target, colours.resampled),
        (colours.accepted, colours.resampled),
        (colours.accepted, colours.rejected),
        (colours.draft, colours.rejected),
        *itertools.combinations(colours.series[:3], 2),
    ]
    for a, b in meeting:
        distance = np.linalg.norm(seen(a, SIGHTS[sight]) - seen(b, SIGHTS[sight]))
        assert distance > 15, f"{a} and {b} are {distance:.0f} apart"


@pytest.mark.parametrize("colours", [_LIGHT, _DARK], ids=["light", "dark"])
def test_everything_stands_out_from_the_page(colours):
    def contrast(colour):
        low, high = sorted([lightness(colour), lightness(colours.paper)])
        return (high + 0.05) / (low + 0.05)

    assert contrast(colours.ink) > 12
    for colour in (colours.target, colours.accepted, colours.resampled, *colours.series):
        assert contrast(colour) > 3


def heights(axis):
    return np.array([patch.get_y() + patch.get_height() for patch in axis.patches])


def test_bars_are_as_high_as_what_they_show():
    bars = heights(draw("distributions")[1])
    np.testing.assert_allclose(bars, [*P, *Q])
    bars = heights(draw("over_and_under")[1])
    # Each grey bar has one of the others on top, and the third has no height.
    np.testing.assert_allclose(bars, [*ACCEPTED, *Q, *P])
    bars = heights(draw("acceptance_rule")[1])
    np.testing.assert_allclose(bars, [*ACCEPTED, *Q])
    bars = heights(draw("rescaled")[1])
    np.testing.assert_allclose(bars, [*LEFT, *LEFT / LEFT.sum()])
    for name in ("stacked", "counts_by_token"):
        bars = heights(draw(name)[1])
        np.testing.assert_allclose(bars[: 2 * len(P)], [*ACCEPTED, *P])
    whole = draw("whole_step")[1].patches
    np.testing.assert_allclose(sum(patch.get_width() for patch in whole), 1)
    np.testing.assert_allclose(heights(draw("acceptance_histogram")[1]), [10, 5, 30])


def test_the_best_k_is_marked():
    axis = draw("speedups")[1]
    (mark,) = [line for line in axis.lines if len(line.get_xdata()) == 1]
    assert mark.get_xdata()[0] == 3


def test_a_page_gets_an_element_in_its_own_colours(tmp_path):
    for theme, colours in (("light", _LIGHT), ("dark", _DARK)):
        element = plot.svg(DRAWINGS["acceptance_histogram"], theme=theme)
        assert element.startswith("<svg")
        assert element.rstrip().endswith("</svg>")
        assert colours.paper in element
        assert colours.accepted in element
    plot.save(tmp_path / "picture.png", DRAWINGS["throughput"])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert matplotlib.rcParams["figure.facecolor"] == matplotlib.rcParamsDefault["figure.facecolor"]


def test_the_mean_rate_is_over_the_whole_time():
    labels = draw("throughput")[1].get_legend_handles_labels()[1]
    assert "mean, 103.3" in labels  # 310 tokens in 3 s, not the mean of three rates


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda axis: plot.lines(axis, KS, {str(i): KS for i in range(6)}), "6 curves are too many"),
        (lambda axis: plot.throughput(axis, [0, 1, 1], [0, 1, 2]), "rising seconds"),
        (lambda axis: plot.throughput(axis, [0], [0]), "two readings"),
        (lambda axis: plot.style("sepia"), "'light' or 'dark'"),
    ],
)
def test_what_cannot_be_drawn_is_said(call, message):
    with pytest.raises(ValueError, match=message):
        call(Figure().subplots())
