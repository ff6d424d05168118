import gc
import os
from pathlib import Path

# A core for each worker: with threads of their own they get in each other's way, and small programs are faster without.
worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if worker and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

os.environ["JAX_ENABLE_X64"] = "1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the time of a test goes into compiling a program that runs for milliseconds.
QUICK = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)
os.environ.setdefault("XLA_FLAGS", QUICK)
# Many tests compile the same small programs; the second time, and in the other worker, they are read back.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")

from jaxtyping import install_import_hook

# Shapes and types are checked inside; the front door checks what users hand over by itself, in sentences.
CHECKED = [
    "sfvi._optim",
    "sfvi.algorithms.local_params",
    "sfvi.algorithms.noise",
    "sfvi.archive",
    "sfvi.barycenter",
    "sfvi.convergence",
    "sfvi.engines",
    "sfvi.families.base",
    "sfvi.families.gaussian",
    "sfvi.families.low_rank",
    "sfvi.families.structured",
    "sfvi.families.triangular",
    "sfvi.model.layout",
    "sfvi.model.programs",
    "sfvi.enhanced",
    "sfvi.natural",
    "sfvi.objectives",
]
with install_import_hook(CHECKED, "beartype.beartype"):
    import sfvi  # noqa: F401

import hypothesis
import jax
import pytest

from .thorough import THOROUGH

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("ci")


def pytest_collection_modifyitems(items):
    """Mark the tests that `make test` leaves out, and begin with the longest: nobody should wait for it at the end."""
    items.sort(key=lambda item: "test_docs.py" not in item.nodeid)
    by_name = {item.nodeid.removeprefix("tests/"): item for item in items}
    for name in THOROUGH:
        if name in by_name:
            by_name[name].add_marker(pytest.mark.thorough)


def pytest_collection_finish():
    """What was imported stays; tracing makes many small objects, among which there is little to find."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture
def float32():
    """Run a test in single precision."""
    with jax.enable_x64(False):
        yield


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_programs():
    """Compiled programs stay in memory for good otherwise: gigabytes over the whole suite."""
    yield
    jax.clear_caches()
