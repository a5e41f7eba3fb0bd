"""Settings that must stand before torch and triton are imported."""

import os
import tempfile

# Kernels run in Triton's interpreter here; tests that need the compiler start a process of their own.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Tests run in parallel processes: one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Shared by the processes of one run, and gone with it.
_cache = tempfile.TemporaryDirectory(prefix="vllm_triton-tests-")
os.environ.setdefault("VLLM_TRITON_CACHE", _cache.name)

from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile(
    "project", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("project")

# These take longest: first, so that no worker is left with one alone at the end.
_LONG_FILES = ("test_natively.py", "test_compiles_for_gpus.py", "test_gpu_check.py", "test_smollm2.py")


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(_LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
