"""The OpenAI-compatible HTTP server: `python -m vllm_triton.serve`. Nothing else in the package needs it."""
