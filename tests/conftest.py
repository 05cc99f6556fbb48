"""How every test runs: eight CPU devices, JAX's strict switches on, programs compiled fast and kept."""

import gc
import os

# JAX reads these when it is first imported, so they come before it (and reach the tests' child processes).
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # most programs run briefly: compiling is what costs time
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # libtpu, where it is installed, looks for a TPU even so
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import pytest
from gguf_files import smollm2, tiny_weights_function, write_gguf  # noqa: F401

from specjax.scripts import _cli

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)
_cli.start()


@pytest.fixture(autouse=True, scope="module")
def programs_freed_after_each_file():
    """Every compiled program holds some memory maps, of which Linux gives a process 65,530.

    A process that has run most of the suite had none left, and crashed inside the next compilation.
    """
    yield
    jax.clear_caches()
    gc.collect()


# A file runs in one process. Begun last, one of these would leave the other process idle for minutes.
LONGEST = (
    *("test_mutants.py", "test_docs.py", "test_notebooks.py", "test_engine.py", "test_smollm2.py"),
    *("test_sharding.py", "test_processes.py", "test_distill.py", "test_train.py"),
)


def pytest_collection_modifyitems(items):
    """Puts the files that take longest first, in the order of their tests."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
