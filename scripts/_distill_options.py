"""The options of `specjax distill`: losses that there are, and what the run in a folder was begun with."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax.scripts import _cli

__all__ = ["check_extra", "check_losses", "check_options", "note_options", "parse_losses"]

NAME = "options.json"
FREE = {
    "out",
    "data",
    "mesh",
    "evaluate_every",
    "save_every",
    "num_speculative_tokens",
    "per_task",
    "max_tokens",
}
"""What a run may change on its way, since the draft's weights don't depend on it."""


def check_extra() -> None:
    """Refuses to begin where the packages that training needs are missing."""
    if missing := [name for name in ("array_record", "grain") if importlib.util.find_spec(name) is None]:
        _cli.fail(f"{' and '.join(missing)} missing: pip install -e '.[distill]'")


def parse_losses(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Losses and their weights, from ``name:weight``.

    Raises:
      ValueError: a weight is no number.
    """
    pairs = [text.partition(":") for text in texts]
    try:
        return tuple((name, float(weight or 1)) for name, _, weight in pairs)
    except ValueError:
        raise ValueError(f"--losses are written name:weight, not {' '.join(texts)}") from None


def check_losses(weights: Sequence[tuple[str, float]]) -> None:
    """Raises a ValueError if a name is no loss's."""
    from specjax.distill.losses import LOSSES

    if unknown := {name for name, _ in weights} - set(LOSSES):
        raise ValueError(f"no loss is named {min(unknown)!r}; there are {', '.join(LOSSES)}")


def check_options(config: Any) -> None:
    """Refuses options other than those that the training in the folder was begun with.

    Raises:
      OSError: the list of them can't be read.
      ValueError: they differ, the list is damaged, or the folder is none.
    """
    if config.out.exists() and not config.out.is_dir():
        raise ValueError(f"--out {config.out} is no folder")
    path, held = config.out / NAME, _held(config)
    if not path.exists():
        return
    try:
        begun = dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError):
        raise ValueError(f"{path} is damaged: name another --out") from None
    for name, value in held.items():
        if (before := begun.get(name, value)) != value:
            raise ValueError(
                f"{config.out} was begun with --{name.replace('_', '-')} {_shown(before)}, not "
                f"{_shown(value)}: go on with that, or name another --out (--init goes on from a draft)"
            )


def note_options(config: Any) -> None:
    """Writes down what the training is begun with."""
    from specjax.engine.sink import replace_file

    config.out.mkdir(parents=True, exist_ok=True)
    replace_file(config.out / NAME, json.dumps(_held(config), indent=1) + "\n")


def _held(config: Any) -> dict[str, Any]:
    values = {name: x for name, x in dataclasses.asdict(config).items() if name not in FREE}
    values = {name: str(x.resolve()) if isinstance(x, Path) else x for name, x in values.items()}
    return dict(json.loads(json.dumps(values)))


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
