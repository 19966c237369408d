"""Thaw's command line and one-machine launcher."""

__version__ = "0.2.0"
