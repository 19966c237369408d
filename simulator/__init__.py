"""Simulate the scheduler's decisions on devices, links and requests by events.

Import from the modules.
"""
