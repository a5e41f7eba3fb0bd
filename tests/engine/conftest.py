"""Engines here take steps of few tokens: natively, kernels compile for steps of every size up to the largest."""

import os

import pytest
from tiny import make_tiny

from vllm_triton import LLM
from vllm_triton.loading import find_demo_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> str:
    """A tiny Llama without a tokenizer."""
    folder = tmp_path_factory.mktemp(f"tiny-{os.getpid()}")
    make_tiny("llama3", folder)
    return str(folder)


@pytest.fixture(scope="module")
def tiny_llm(tiny_folder) -> LLM:
    sizes = {"num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    return LLM(tiny_folder, dtype="float32", skip_tokenizer_init=True, **sizes)


@pytest.fixture(scope="module")
def demo_llm() -> LLM:
    return LLM(str(find_demo_model()), dtype="float32", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=128)
