"""Transfer weights from a source into the pool (ADR 0013).

The package has a load's pieces, the links that read them, and the load's progress.
"""
