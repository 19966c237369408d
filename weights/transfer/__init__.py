"""Bytes on their way into the pool: a load's pieces, the links that read them, and how far each load is (ADR 0013)."""
