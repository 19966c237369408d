"""Stages of a pipeline group: their connections, and what they compute (ADR 0067, 0068)."""
