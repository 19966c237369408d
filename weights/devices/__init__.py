"""Devices that hold weights: host memory that engines map, or a GPU's memory.

Import from the modules.
"""
