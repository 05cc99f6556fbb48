"""Runs the notebooks from top to bottom and writes their outputs: python notebooks/refresh.py [NAME.ipynb ...]"""

from __future__ import annotations

import sys
from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).parent
WIDGET = "application/vnd.jupyter.widget-view+json"


def run(path: Path) -> nbformat.NotebookNode:
    """Executes a notebook in a fresh kernel; a cell that fails raises nbclient's CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        store_widget_state=False,
        record_timing=False,
    )
    return client.execute()


def still(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook for readers without a kernel: sliders leave their figure and a line of text."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(WIDGET, None)
            if "metadata" in output:
                output.metadata = {}
            output.pop("transient", None)
    return notebook


def main(names: list[str]) -> None:
    """Refreshes the named notebooks, or all."""
    for path in [FOLDER / name for name in names] or sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(still(run(path)), path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
