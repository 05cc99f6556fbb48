"""The arrows between the rooms, read from the imports; and no file that has outgrown its idea."""

import ast
import graphlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES = 400

# What each room of the core may import besides itself. A room is a file or a folder of specjax/.
ARROWS: dict[str, set[str]] = {
    "types": set(),
    "rows": {"types"},
    "prefill": {"types"},
    "record": {"types", "rows"},
    "sampling": {"types"},
    "cache": {"types"},
    "verify": {"types", "sampling"},
    "theory": set(),
    "theory_law": {"theory"},
    "drafters": {"types", "rows", "sampling", "cache"},
}
ARROWS["decode"] = {"types", "rows", "sampling", "prefill", "cache", "verify", "drafters"}
ARROWS["generate"] = ARROWS["decode"] | {"decode", "record", "parallel"}
ARROWS["parallel"] = ARROWS["decode"] | {"decode", "theory"}
ARROWS["plot"] = {"theory"}
ARROWS["trace"] = ARROWS["generate"] | {"generate"}
ARROWS["engine"] = ARROWS["generate"] | {"generate"}
ARROWS["audit"] = ARROWS["generate"] | {"generate", "theory"}
ARROWS["distill"] = ARROWS["generate"] | {"generate", "theory"}

# All that a model may know of the core.
MODELS_SEE = {"specjax.types", "specjax.cache", "specjax.parallel.sharding"}

# The core computes: reading files, text and command lines is for models and scripts.
NOT_IN_THE_CORE = {"flax", "gguf", "jinja2", "tokenizers", "tyro"}


def module_name(path: str) -> str:
    """``models/layers.py`` is ``specjax.models.layers``, as it is installed."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.split(".")[0] == "specjax" else f"specjax.{name}"


def imported_modules(path: str, source: str, known: set[str]) -> Iterator[str]:
    """Every module that a file imports, wherever in the file, by its full name."""
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package.pop()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*origin, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                yield name if name in known else base


def room(module: str) -> str:
    """``drafters`` for ``specjax.drafters.lookup``; empty for ``specjax`` itself."""
    return [*module.split("."), ""][1]


def allowed(importer: str, imported: str) -> bool:
    """Whether the arrows let one module of specjax import another."""
    source, target = room(importer), room(imported)
    if source == "scripts":
        return True
    if source == "models":
        return target == "models" or imported in MODELS_SEE
    if source == "":  # specjax/__init__.py gathers the core's names
        return target in ARROWS
    return target == source or target in ARROWS.get(source, ())


def violations(sources: Mapping[str, str]) -> list[str]:
    """What breaks the rules in a tree of files, given as path -> source."""
    known = {module_name(path) for path in sources}
    graph: dict[str, set[str]] = {}
    found = []
    for path, source in sources.items():
        module = module_name(path)
        imports = set(imported_modules(path, source, known))
        graph[module] = imports & known - {module}
        if room(module) not in {"", "models", "scripts", *ARROWS}:
            found.append(f"{path}: a room that ARROWS does not know")
        for name in sorted(imports):
            top = name.split(".")[0]
            if top == "specjax" and not allowed(module, name):
                found.append(f"{path}: imports {name}")
            if top in NOT_IN_THE_CORE and room(module) not in ("models", "scripts"):
                found.append(f"{path}: imports {name}, which is not for the core")
            if top == "matplotlib" and room(module) != "plot":
                found.append(f"{path}: imports {name}, which is for specjax.plot alone")
        if (lines := len(source.splitlines())) > MAX_LINES:
            found.append(f"{path}: {lines} lines, more than {MAX_LINES}")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append(f"import cycle: {' -> '.join(error.args[1])}")
    return found


def test_the_house_keeps_its_arrows():
    files = [file for folder in ("specjax", "models", "scripts") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 10
    assert violations({str(file.relative_to(ROOT)): file.read_text() for file in files}) == []


def test_no_test_file_outgrows_its_idea():
    long = [file for file in (ROOT / "tests").rglob("*.py") if file.read_text().count("\n") > MAX_LINES]
    assert long == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("specjax/types.py", "import specjax.sampling", "imports specjax.sampling"),
        ("specjax/verify.py", "from specjax.drafters import lookup", "imports specjax.drafters.lookup"),
        ("specjax/drafters/model.py", "from specjax.verify import token", "imports specjax.verify"),
        ("specjax/drafters/model.py", "from ..verify import token", "imports specjax.verify"),
        ("specjax/drafters/__init__.py", "from .. import verify", "imports specjax.verify"),
        ("specjax/decode.py", "def f():\n    from specjax import engine", "imports specjax.engine"),
        ("specjax/decode.py", "from specjax.models.layers import Block", "imports specjax.models.layers"),
        ("specjax/__init__.py", "import specjax.models", "imports specjax.models"),
        ("specjax/sampling.py", "from specjax import __version__", "imports specjax"),
        ("models/layers.py", "from specjax.decode import generate", "imports specjax.decode"),
        ("models/layers.py", "from specjax import parallel", "imports specjax.parallel"),
        ("models/layers.py", "from specjax.scripts import demo", "imports specjax.scripts.demo"),
        ("specjax/cache.py", "import flax.nnx as nnx", "imports flax.nnx, which is not for the core"),
        (
            "scripts/batch.py",
            "def f():\n    import matplotlib.axes",
            "imports matplotlib.axes, which is for specjax.plot alone",
        ),
        ("specjax/attic.py", "", "a room that ARROWS does not know"),
        ("specjax/types.py", "x = 1\n" * 401, "401 lines, more than 400"),
    ],
)
def test_a_planted_violation_is_found(path, source, complaint):
    neighbours = ("verify", "engine/__init__", "drafters/lookup", "parallel/__init__", "parallel/sharding")
    sources = {f"specjax/{name}.py": "" for name in neighbours} | {"scripts/demo.py": ""}
    assert violations(sources | {path: source}) == [f"{path}: {complaint}"]


def test_a_planted_cycle_is_found():
    sources = {"models/a.py": "from specjax.models import b", "models/b.py": "from .a import x"}
    (complaint,) = violations(sources)
    assert complaint.startswith("import cycle: ")


def test_what_the_arrows_allow_passes():
    sources = {
        "specjax/types.py": "import jax",
        "specjax/sampling.py": "from specjax.types import Array",
        "specjax/drafters/__init__.py": "from .model import ModelDrafter",
        "specjax/drafters/model.py": "from specjax import sampling",
        "specjax/prefill.py": "from . import types",
        "specjax/parallel/sharding.py": "",
        "models/layers.py": "import flax\nfrom .config import C\nfrom specjax.parallel.sharding import s",
        "models/config.py": "",
        "scripts/demo.py": "import specjax, tyro\nfrom specjax.models import layers\nfrom . import _cli",
        "scripts/_cli.py": "",
    }
    assert violations(sources) == []
