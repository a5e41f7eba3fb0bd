"""The disk cache: what is a key, what is kept, and what becomes of a damaged entry."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gguf_files import SHAPES, write_model
from small_forward import INPUTS, constants, forward, plain_step, step_inputs
from tiny import make_tiny

from vllm_triton.compile import cache
from vllm_triton.compile.cache import CompileCache, hash_of_files
from vllm_triton.compile.pieces import build
from vllm_triton.compile.pieces.build import Recipe, build_program
from vllm_triton.compile.pieces.compilers import EagerCompiler
from vllm_triton.compile.pieces.ranges import compile_ranges
from vllm_triton.config import EngineConfig
from vllm_triton.ops import registry
from vllm_triton.runner import compilation
from vllm_triton.runner.load import load_model

KEY = "0" * 64


class _Stop(Exception):
    """Carries the key of the program that would have been built."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny("llama3", folder)
    return str(folder)


@pytest.fixture
def key_of(tiny, monkeypatch):
    """`key_of(**settings)`: the key of an engine with these settings."""

    def stop(recipe, cache, key, description):
        raise _Stop(key)

    monkeypatch.setattr(compilation, "build_program", stop)

    def run(**settings) -> str:
        monkeypatch.setattr(registry, "_frozen", None)
        with pytest.raises(_Stop) as stopped:
            load_model(EngineConfig(**{"model": tiny, "dtype": "float32", "num_kv_blocks": 9} | settings))
        return str(stopped.value)

    yield run
    for op in registry.OPS.values():
        op._active = None


# Another value of each setting, and whether it shapes the program.
SETTINGS = {
    "model": ("another folder", True),
    "dtype": ("bfloat16", True),
    "kv_cache_dtype": ("fp8", True),
    "quantization": ("none", False),  # of a folder; what stays packed shows in the constants
    "quantization_config": ({"targets": {"*.o_proj": "int8_per_channel"}}, True),
    "max_model_len": (128, True),  # the table of rotary angles
    "num_kv_blocks": (12, False),
    "block_size": (32, True),
    "max_num_seqs": (3, False),
    "max_num_batched_tokens": (64, True),  # the last range
    "long_prefill_token_threshold": (16, False),
    "enable_prefix_caching": (False, False),
    "scheduling_policy": ("priority", False),
    "seed": (7, False),
    "kernels": ({"silu_and_mul": "reference"}, True),
    "optimization_level": (3, False),
    "cudagraph_mode": ("none", False),
    "cudagraph_capture_sizes": ([2], False),
    "compile_backend": ("inductor", True),
    "compile_ranges": ([8], True),
    "compile_sizes": ([4], True),
    "load_format": ("dummy", False),
    "skip_tokenizer_init": (True, False),
}


def test_every_setting_is_in_the_key_or_is_not(key_of, tmp_path):
    make_tiny("llama-yarn-bias", tmp_path)
    before = key_of()
    assert key_of() == before
    assert list(SETTINGS) == [field.name for field in dataclasses.fields(EngineConfig)]
    for name, (value, shapes) in SETTINGS.items():
        value = str(tmp_path) if name == "model" else value
        assert (key_of(**{name: value}) != before) == shapes, name


def test_the_same_model_elsewhere_is_the_same_program(key_of, tmp_path):
    make_tiny("llama3", tmp_path, seed=1)
    assert key_of(model=str(tmp_path)) == key_of()


def test_the_formats_of_packed_weights_are_in_the_key(key_of, tmp_path):
    keys = set()
    for kind in ("Q4_0", "Q4_1", "Q4_K"):
        write_model(tmp_path / "m.gguf", [dict.fromkeys(SHAPES, kind)])
        keys |= {key_of(model=str(tmp_path / "m.gguf"), quantization=each) for each in ("gguf", "none")}
    assert len(keys) == 4  # dequantised, they are one model


def test_sources_and_versions_are_in_the_key(key_of, monkeypatch):
    keys = [key_of()]
    monkeypatch.setattr(compilation.triton, "__version__", "0.0")
    keys.append(key_of())
    for folder in ("models", "pieces", "ops"):
        changed = lambda *paths, folder=folder: hash_of_files(*paths) + ("!" if paths[0].name == folder else "")
        monkeypatch.setattr(compilation, "hash_of_files", changed)
        keys.append(key_of())
    assert len(set(keys)) == len(keys)


def test_an_implementation_from_outside_is_in_the_key(key_of, tmp_path, monkeypatch):
    keys = []
    for source in ("fast", "faster"):
        (tmp_path / "outside_kernel.py").write_text(
            f"from vllm_triton import ops\n@ops.silu_and_mul.impl('outside')\ndef run(x):  # {source}\n    return x"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        sys.modules.pop("outside_kernel", None)
        __import__("outside_kernel")
        keys.append(key_of(kernels={"silu_and_mul": "outside"}))
        del registry.OPS["silu_and_mul"].implementations["outside"]
    assert keys[0] != keys[1]


def test_a_source_is_hashed_with_its_name(tmp_path):
    (tmp_path / "a.py").write_text("x")
    before = hash_of_files(tmp_path)
    (tmp_path / "a.txt").write_text("no source")
    assert hash_of_files(tmp_path) == before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert hash_of_files(tmp_path) != before


def _recipe() -> Recipe:
    return Recipe(forward, INPUTS, constants(), torch.device("cpu"), EagerCompiler(), compile_ranges([8], 64))


def _run(program) -> torch.Tensor:
    return program(plain_step(5), 5, *step_inputs(5).values())


@pytest.fixture
def expected() -> torch.Tensor:
    return forward(step_inputs(5), constants())


def _forbid(monkeypatch) -> None:
    """From now on a trace is an error."""
    monkeypatch.setattr(build, "trace", lambda *arguments: pytest.fail("traced again"))


def test_a_second_start_traces_nothing(tmp_path, expected, monkeypatch):
    store = CompileCache(tmp_path / "forwards")
    assert torch.equal(_run(build_program(_recipe(), store, KEY, {})), expected)
    _forbid(monkeypatch)
    assert torch.equal(_run(build_program(_recipe(), store, KEY, {})), expected)
    assert "def piece_1(T" in (store.root / KEY / "forward.py").read_text()


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "no manifest", "not JSON", "another layout"])
def test_a_damaged_entry_is_built_again(tmp_path, expected, caplog, damage):
    store = CompileCache(tmp_path / "forwards")
    build_program(_recipe(), store, KEY, {})
    layout, manifest = store.root / KEY / "forward.json", store.root / KEY / "manifest.json"
    good = layout.read_text()
    if damage == "truncated":
        layout.write_text(good[: len(good) // 2])
    elif damage == "changed":
        layout.write_text(good.replace("rms_norm", "rms_form", 1))
    elif damage == "missing":
        layout.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "not JSON":
        manifest.write_text("[]")
    else:  # whole, but nothing that this version reads
        layout.write_text("{}")
        files = json.loads(manifest.read_text())
        files["files"]["forward.json"] = cache.hashlib.sha256(b"{}").hexdigest()
        manifest.write_text(json.dumps(files))
    with caplog.at_level(logging.WARNING):
        assert torch.equal(_run(build_program(_recipe(), store, KEY, {})), expected)
    assert f"{KEY} is damaged and will be built again" in caplog.text
    assert layout.read_text() == good
    caplog.clear()
    build_program(_recipe(), store, KEY, {})
    assert caplog.text == ""


def test_a_build_that_fails_leaves_nothing(tmp_path):
    store = CompileCache(tmp_path / "forwards")
    with pytest.raises(ZeroDivisionError), store.build(KEY, {}) as folder:
        (folder / "half").write_text("h")
        raise ZeroDivisionError
    assert list(store.root.iterdir()) == [] and store.find(KEY) is None


def test_several_processes_start_at_once(tmp_path, expected):
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from test_compile_cache import *; from test_compile_cache import _recipe, _run\n"
        "print(float(_run(build_program(_recipe(), CompileCache(cache.Path(sys.argv[1])), KEY, {})).sum()))"
    )
    here = os.path.dirname(__file__)
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path / "forwards"), here, f"{here}/../models"]
    with ThreadPoolExecutor(3) as pool:
        runs = list(pool.map(lambda _: subprocess.run(command, capture_output=True, text=True), range(3)))
    assert {run.returncode for run in runs} == {0}, runs[0].stderr
    assert {float(run.stdout) for run in runs} == {float(expected.sum())}
    assert [folder.name for folder in (tmp_path / "forwards").iterdir()] == [KEY]


def test_without_a_folder_to_write_nothing_is_kept(tmp_path, expected, caplog):
    (tmp_path / "file").write_text("in the way")
    store = CompileCache(tmp_path / "file" / "forwards")
    assert torch.equal(_run(build_program(_recipe(), store, KEY, {})), expected)
    assert "nothing is kept, since its folder cannot be written" in caplog.text


def test_on_a_full_disk_nothing_is_kept(tmp_path):
    """The limit on a file's size stands in for a full disk."""
    code = (
        "import sys, signal, resource, logging; sys.path[:0] = sys.argv[2:]; logging.basicConfig()\n"
        "from test_compile_cache import *; from test_compile_cache import _recipe, _run\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "print(float(_run(build_program(_recipe(), CompileCache(cache.Path(sys.argv[1])), KEY, {})).sum()))"
    )
    here = os.path.dirname(__file__)
    command = [sys.executable, "-c", code, str(tmp_path / "forwards"), here, f"{here}/../models"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) == float(forward(step_inputs(5), constants()).sum())
    assert f"entry {KEY} could not be kept" in run.stderr and "File too large" in run.stderr
    assert list((tmp_path / "forwards").iterdir()) == []


def test_what_ended_processes_left_is_removed(tmp_path, monkeypatch):
    store = CompileCache(tmp_path)
    for name in ("old", "new"):
        (tmp_path / f"{cache._UNFINISHED}{name}").mkdir()
    os.utime(tmp_path / f"{cache._UNFINISHED}old", (0, 0))
    with store.build(KEY, {}):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {KEY, f"{cache._UNFINISHED}new"}


def test_the_command_lists_and_clears(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_TRITON_CACHE", str(tmp_path))
    assert cache.main([]) == 0
    assert capsys.readouterr().out == f"0 entries in {tmp_path}/forwards\n"
    store = CompileCache()
    build_program(_recipe(), store, KEY, {"model": "small"})
    unfinished = store.root / f"{cache._UNFINISHED}x"
    unfinished.mkdir()  # another process writes it now
    assert cache.main([]) == 0
    assert "model small" in capsys.readouterr().out
    assert cache.main(["--json"]) == 0
    [entry] = json.loads(capsys.readouterr().out)
    assert entry["key"] == KEY and entry["bytes"] > 1000 and entry["description"] == {"model": "small"}
    assert cache.main(["--clear"]) == 0
    assert list(store.root.iterdir()) == [unfinished]
