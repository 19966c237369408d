"""Device memory as a pool of pages with content-addressed units of weights (ADR 0054)."""
