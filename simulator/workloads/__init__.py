"""Requests to simulate: drawn from published distributions, or read from traces.

Import from the modules.
"""
