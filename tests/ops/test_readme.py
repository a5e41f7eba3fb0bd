"""The README's example runs, and its glossary has every letter that a contract uses."""

import re
import subprocess
import sys
from pathlib import Path

import vllm_triton.ops  # noqa: F401  (fills the registry)
from vllm_triton.ops.registry import OPS

README = (Path(__file__).parents[2] / "ops" / "README.md").read_text()


def test_the_example_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    script = tmp_path / "mine.py"
    script.write_text(code + "\nprint(*silu_and_mul.implementations)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "mine"


def test_the_glossary_names_every_size():
    tables = "".join(line for line in README.splitlines(keepends=True) if line.startswith("|"))
    cells = re.findall(r"\| ([A-Z]\w*(?:, [A-Z]\w*)*) (?=\|)", tables)
    listed = [letter for cell in cells for letter in cell.split(", ")]
    named = set(listed)
    assert len(listed) == len(named), "each size has one row"
    used = {
        size.name
        for op in OPS.values()
        for tensor in (*op.contract.tensors.values(), *op.contract.results.values())
        for size in tensor.sizes
        if size.name is not None
    }
    assert used - named == set()
