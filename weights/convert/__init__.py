"""`thaw convert`: other layouts of weights into the one that loads fastest."""
