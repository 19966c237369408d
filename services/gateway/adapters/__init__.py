"""Adapters to NATS, and the tokenizer."""
