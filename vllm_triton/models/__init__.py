"""Decoders and their configurations."""
