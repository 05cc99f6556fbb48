"""Run the notebooks from top to bottom and write their outputs, and the pictures that docs take from them.

    python notebooks/refresh.py [NAME.ipynb ...]

A cell that begins with the comment ``# docs/images/NAME.png`` has its picture written there, for a light page
and, as ``NAME-dark.png``, for a dark one.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).parent.parent
WIDGET = "application/vnd.jupyter.widget-view+json"


def run(path: Path, theme: str = "light") -> nbformat.NotebookNode:
    """Executes a notebook in a fresh kernel; a cell that fails raises nbclient's CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace('plot.style("light")', f'plot.style("{theme}")')
    client = nbclient.NotebookClient(
        notebook,
        timeout=3600,
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
        if cell.cell_type == "code":  # a slow machine remarks on how long it compiles
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(WIDGET, None)
            if "metadata" in output:
                output.metadata = {}
            output.pop("transient", None)
    return notebook


def save_pictures(notebook: nbformat.NotebookNode, suffix: str) -> None:
    """Writes the pictures of the cells that name a file."""
    for cell in notebook.cells:
        first = cell.source.partition("\n")[0]
        if cell.cell_type == "code" and first.startswith("# docs/images/"):
            (picture,) = [one.data["image/png"] for one in cell.outputs if "image/png" in one.get("data", {})]
            path = ROOT / first.removeprefix("# ")
            path.parent.mkdir(exist_ok=True)
            path.with_stem(path.stem + suffix).write_bytes(base64.b64decode(picture))


def main(names: list[str]) -> None:
    """Refreshes the named notebooks, or all."""
    folder = ROOT / "notebooks"
    for path in [folder / name for name in names] or sorted(folder.glob("*.ipynb")):
        save_pictures(run(path, "dark"), "-dark")
        notebook = still(run(path))
        save_pictures(notebook, "")
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
