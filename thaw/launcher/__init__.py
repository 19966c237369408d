"""Run a mesh on one machine.

The servers are from their wheels, every service is a process, and one supervisor runs them.
"""
