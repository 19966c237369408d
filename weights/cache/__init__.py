"""Cache remote models on the disk, for all loaders of the machine (ADR 0020)."""
