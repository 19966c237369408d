"""Where bytes come from, one small module for each kind of place (ADR 0013)."""
