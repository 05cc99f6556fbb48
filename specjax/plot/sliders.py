"""A figure with sliders, which is a plain figure where no kernel runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["sliders"]


def sliders(draw: Callable[..., Any], **values: tuple[float, float, float]) -> None:
    """Shows ``draw(**numbers)`` in a notebook and draws it anew whenever a slider is moved.

    The figure is an ordinary output that is updated in place: a static page keeps the picture at the values
    given here, and says in words where the sliders would be.

    Args:
      draw: makes a figure with pyplot and returns it, from one number by each name.
      values: by name: where the slider starts, its lowest and its highest value.
    """
    # Here, since only a notebook has them all.
    import ipywidgets
    from IPython import display
    from matplotlib import pyplot

    def picture() -> Any:
        figure = draw(**{name: control.value for name, control in controls.items()})
        pyplot.close(figure)  # or it would be shown a second time at the cell's end
        return figure

    controls = {
        name: ipywidgets.FloatSlider(
            value=value, min=low, max=high, step=(high - low) / 100, description=name.replace("_", " ")
        )
        for name, (value, low, high) in values.items()
    }
    box = ipywidgets.VBox(list(controls.values()))
    shown = display.display(picture(), display_id=True)
    for control in controls.values():
        control.observe(lambda _: shown.update(picture()), names="value")
    data = box._repr_mimebundle_()
    data["text/plain"] = f"(With a running kernel: sliders for {', '.join(values)}.)"
    display.display(data, raw=True)
