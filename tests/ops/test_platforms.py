"""What a platform says about its machine."""

import pytest

from vllm_triton.ops import platforms
from vllm_triton.ops.platforms import _available_host_memory

MIB = 2**20


@pytest.mark.parametrize(
    "limit, used, cached, expected",
    [
        (64 * MIB, 48 * MIB, (4 * MIB, 36 * MIB), 56 * MIB),
        (64 * MIB, 64 * MIB, (0, 0), 0),
    ],
)
def test_memory_within_a_limit_does_not_count_cached_files_as_used(tmp_path, limit, used, cached, expected):
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\nactive_file {cached[0]}\ninactive_file {cached[1]}\n")
    assert _available_host_memory(tmp_path) == expected


def test_memory_without_a_limit_is_the_machines(tmp_path):
    machine = _available_host_memory(tmp_path / "no-control-group")
    assert machine > 100 * MIB
    for name, content in (("memory.max", "max"), ("memory.current", "1"), ("memory.stat", "")):
        (tmp_path / name).write_text(content)
    assert _available_host_memory(tmp_path) > machine / 2


def test_a_cpu_prefers_triton_unless_it_interprets(monkeypatch):
    monkeypatch.setattr(platforms, "triton_interprets", lambda: False)
    assert platforms.CPU.order("linear") == ("triton", "torch", "reference")
    monkeypatch.setattr(platforms, "triton_interprets", lambda: True)
    assert platforms.CPU.order("linear") == ("torch", "reference", "triton")
