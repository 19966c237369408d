"""Requests into the engine and responses out of it."""
