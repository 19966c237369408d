"""Drivers: the command line, API and sleep modes of each engine.

A driver does not depend on the mesh.
"""
