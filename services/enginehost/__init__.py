"""The host process of a non-builtin engine: starts the engine and connects it to the mesh (ADR 0014)."""
