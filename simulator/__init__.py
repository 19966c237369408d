"""Discrete-event simulation of the scheduler's decisions on devices, links and requests.

Import from the modules.
"""
