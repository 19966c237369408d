"""Copies of remote models on this host's disk, shared by all loaders of the machine (ADR 0020)."""
