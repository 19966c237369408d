"""Sources of bytes, one small module for each kind (ADR 0013)."""
