"""Requests with an Idempotency-Key: one execution, replayed for every repetition."""
