"""`thaw convert`: other checkpoint formats into the one that loads fastest."""
