"""The tree is what the README says, layers import downwards only, and files stay readable."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ops", "compile", "vllm_triton")
TORCH_FREE = ("vllm_triton/scheduler", "vllm_triton/kv_cache", "vllm_triton/engine/messages.py")
MOST_LINES = 400


def _files(*folders: str) -> list[Path]:
    """Python files, each once: the links vllm_triton/ops and vllm_triton/compile are not followed."""
    paths = [ROOT / folder for folder in folders]
    found = [path for path in paths if path.is_file()]
    for path in paths:
        found += [file for file in path.rglob("*.py") if not any(parent.is_symlink() for parent in file.parents)]
    return sorted(found)


def _imports(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _bad(folder: str, refused: str) -> list[str]:
    pattern = re.compile(refused)
    return [
        f"{file.relative_to(ROOT)}: {name}" for file in _files(folder) for name in _imports(file) if pattern.match(name)
    ]


def test_ops_import_nothing_above_them():
    assert _bad("ops", r"vllm_triton(?!\.ops(\.|$))") == []


def test_ops_import_few_libraries():
    allowed = sys.stdlib_module_names | {"torch", "triton", "numpy", "einops", "vllm_triton", "hypothesis"}
    assert [name for file in _files("ops") for name in _imports(file) if name.split(".")[0] not in allowed] == []


def test_compile_imports_the_registry_and_no_kernel():
    assert _bad("compile", r"vllm_triton\.ops\.\w+\.kernel|vllm_triton\.(?!ops|compile|envs|errors)") == []


@pytest.mark.parametrize("folder", TORCH_FREE)
def test_bookkeeping_is_plain_python(folder):
    assert _bad(folder, r"(torch|triton|numpy)(\.|$)") == []


def test_nothing_imports_tests_or_bench():
    assert [name for package in PACKAGES for name in _bad(package, r"(tests|bench)(\.|$)")] == []


def test_files_are_short_or_say_why():
    for file in _files(*PACKAGES, "tests", "bench"):
        lines = file.read_text().splitlines()
        reason = "Longer than" in "\n".join(lines[:20])
        assert len(lines) <= MOST_LINES or reason, (
            f"{file.relative_to(ROOT)} has {len(lines)} lines and gives no reason"
        )


def test_two_files_read_the_environment():
    """The engine's, and that of the Triton backend for CPUs, which serves processes without an engine."""
    readers = [str(file.relative_to(ROOT)) for file in _files(*PACKAGES) if "os.environ" in file.read_text()]
    assert readers == ["compile/triton_cpu/settings.py", "vllm_triton/envs.py"]


def test_import_is_light():
    code = "import sys, vllm_triton; print([m for m in ('torch', 'triton', 'numpy', 'fastapi') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_llm_needs_no_server_packages():
    code = """
import sys
for name in ("fastapi", "uvicorn", "prometheus_client", "pydantic"):
    sys.modules[name] = None
from vllm_triton import LLM, SamplingParams
print("transformers" in sys.modules)
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_readme_tree_names_every_folder():
    readme = (ROOT / "README.md").read_text()
    tree = readme.split("<!-- tree -->")[1]
    named = set()
    stack: list[str] = []
    for line in tree.splitlines():
        match = re.match(r"^( *)([\w.]+/?)(?: +\S.*)?$", line)
        if match is None:
            continue
        depth = len(match[1]) // 2
        stack = [*stack[:depth], match[2].rstrip("/")]
        named.add("/".join(stack))
    for path in named:
        assert (ROOT / path).exists(), f"the README's tree names {path}, which does not exist"
    folders = {
        str(path.relative_to(ROOT))
        for package in (*PACKAGES, "tests", "bench", "notebooks")
        for path in [ROOT / package, *(ROOT / package).iterdir()]
        if path.is_dir() and not path.is_symlink() and path.name != "__pycache__" and any(path.iterdir())
    }
    missing = sorted(folder for folder in folders if folder not in named)
    assert not missing, f"the README's tree leaves out {missing}"
