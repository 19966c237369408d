"""The host of a non-builtin engine, which connects it to the mesh (ADR 0014)."""
