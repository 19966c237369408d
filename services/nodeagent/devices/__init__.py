"""Devices of a node: inventory, budgets and measurements."""
