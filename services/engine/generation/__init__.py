"""Generating tokens and embeddings: the computing thread, its sequences, the KV cache and sampling."""
