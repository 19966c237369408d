"""Building a model on the bytes that the node's loader holds."""
