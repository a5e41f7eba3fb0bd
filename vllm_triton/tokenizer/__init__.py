"""Text in and out: tokenizers, chat templates, prompts, and the text of growing answers."""

from vllm_triton.tokenizer.detokenizer import IncrementalDetokenizer
from vllm_triton.tokenizer.renderer import RenderedPrompt, Renderer
from vllm_triton.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "RenderedPrompt", "Renderer", "Tokenizer"]
