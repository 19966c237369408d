"""Moves running requests from one engine to another: makes the pause short, and is otherwise dispensable."""
