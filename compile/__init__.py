"""Cutting, compiling and capturing the forward. Import it as `vllm_triton.compile`."""

if __name__ != "vllm_triton.compile":
    raise ImportError(f"import this package as 'vllm_triton.compile', not as {__name__!r}: two copies would disagree")
