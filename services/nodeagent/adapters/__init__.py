"""Adapters of the nodeagent: measurements, status, records on disk."""
