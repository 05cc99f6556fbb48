"""The one exception that a bad model file ends in."""

from __future__ import annotations

import os

__all__ = ["ModelFileError"]


class ModelFileError(ValueError):
    """A model file is missing, damaged or of an unsupported kind; says which file and what to do."""

    def __init__(self, path: str | os.PathLike[str], problem: str) -> None:
        super().__init__(f"{os.fspath(path)}: {problem}")
