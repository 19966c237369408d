"""Decisions of the engine that need neither torch nor a clock."""
