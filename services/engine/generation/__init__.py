"""The computing thread: sequences, KV cache, sampling and embeddings."""
