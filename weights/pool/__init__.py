"""The pool of chunks in shared memory (ADR 0012).

`chunks` decides which load owns each chunk; `memory` has the chunks' pages.
"""
