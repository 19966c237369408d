"""The process behind an instance of any engine but the builtin one: it starts the engine and speaks the mesh for it (ADR 0014)."""
