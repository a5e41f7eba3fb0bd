"""What can go wrong between a model and its pieces."""

from vllm_triton.errors import VllmTritonError


class TraceError(VllmTritonError, RuntimeError):
    """A forward cannot be written as straight-line code for any number of tokens."""
