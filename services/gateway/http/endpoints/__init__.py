"""One class per group of HTTP routes."""
