"""Checks around every request: connection limits, browser guard, API keys, error responses."""
