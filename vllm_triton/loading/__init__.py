"""Checkpoints: Hugging Face folders, GGUF files and hub ids behind one interface."""

from vllm_triton.loading.checkpoint import Checkpoint, open_checkpoint
from vllm_triton.loading.demo import find_demo_model

__all__ = ["Checkpoint", "find_demo_model", "open_checkpoint"]
