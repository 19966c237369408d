"""From a source into the pool: a load's pieces, the links that read them, and the load's progress (ADR 0013)."""
