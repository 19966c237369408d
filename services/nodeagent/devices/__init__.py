"""Devices of a node: which there are, their budgets, and what is measured on them."""
