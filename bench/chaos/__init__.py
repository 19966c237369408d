"""Run a campaign of random faults against a mesh under load.

The results show how clients see the faults.
"""
