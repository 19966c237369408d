"""The pool of chunks in shared memory (ADR 0012): what `domain/chunks.py` decides about, as pages of a file."""
