"""Requests to a hosted engine and its responses, with their tokens and usage."""
