"""Connections on which engines exchange keys and values of requests (ADR 0084)."""
