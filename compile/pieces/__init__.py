"""The forward as straight-line code: traced once, cut at the ops that use the KV cache, compiled piece by piece."""
