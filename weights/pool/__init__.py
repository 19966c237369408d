"""The pool of chunks in shared memory (ADR 0012): `chunks` decides who owns which, `memory` has their pages."""
