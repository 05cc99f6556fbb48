"""Every notebook runs from top to bottom as it lies there, and its committed outputs are small and whole."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def load_refresh():
    spec = importlib.util.spec_from_file_location("refresh", FOLDER / "refresh.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kinds(cell):
    """What a cell shows: the kinds of data, without the data."""
    return [(one.output_type, sorted(one.get("data", {}))) for one in cell.get("outputs", ())]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_committed_outputs_are_small_and_come_from_one_run(name):
    assert (FOLDER / name).stat().st_size < 1_000_000
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    found = [kind for cell in code for kind in kinds(cell)]
    assert len([kind for _, kind in found if "image/png" in kind]) >= 3
    assert "error" not in {kind for kind, _ in found}
    streams = {one.name for cell in code for one in cell.outputs if one.output_type == "stream"}
    assert streams <= {"stdout"}, "a warning was committed"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the kernel's own
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs_and_shows_what_is_committed(name):
    refresh = load_refresh()
    fresh = refresh.still(refresh.run(FOLDER / name))
    committed = nbformat.read(FOLDER / name, as_version=4)
    assert list(map(kinds, fresh.cells)) == list(map(kinds, committed.cells))


def test_sliders_leave_a_picture_and_a_line_of_text():
    found = [
        one
        for name in NOTEBOOKS
        for cell in nbformat.read(FOLDER / name, as_version=4).cells
        for one in cell.get("outputs", ())
        if "sliders for" in one.get("data", {}).get("text/plain", "")
    ]
    assert found
    assert {tuple(one.data) for one in found} == {("text/plain",)}


def test_pictures_of_the_docs_come_from_the_notebooks():
    made = {
        line.removeprefix("# docs/images/")
        for name in NOTEBOOKS
        for cell in nbformat.read(FOLDER / name, as_version=4).cells
        if (line := cell.source.partition("\n")[0]).startswith("# docs/images/")
    }
    images = FOLDER.parent / "docs" / "images"
    for name in made:
        for path in (images / name, images / name.replace(".png", "-dark.png")):
            assert path.read_bytes().startswith(b"\x89PNG"), f"{path} is missing: run notebooks/refresh.py"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_claim_is_checked_where_it_is_drawn(name):
    cells = nbformat.read(FOLDER / name, as_version=4).cells
    pictures = [cell for cell in cells if any("image/png" in kind for _, kind in kinds(cell))]
    unchecked = [cell.source.splitlines()[0] for cell in pictures if "assert" not in cell.source]
    # Sliders draw what the cell before them has checked.
    assert [line for line in unchecked if not line.startswith(("def ", "plot.sliders"))] == []
