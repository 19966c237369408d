"""Simulation of the whole scheduler: `decide`, and the mesh's own messages.

Import from the modules.
"""
