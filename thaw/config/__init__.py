"""Read thaw.yaml, and check it completely before anything starts.

Every fault is reported with its line.
"""

from thaw.config.faults import ConfigError, Fault
from thaw.config.load import ThawFile, load_config

__all__ = ["ConfigError", "Fault", "ThawFile", "load_config"]
