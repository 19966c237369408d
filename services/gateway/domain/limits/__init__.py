"""Limits of API keys that hold over all gateways together (docs/adr/0069)."""
