"""thaw.yaml: read, checked whole before anything starts, every fault named with its line."""

from thaw.config.faults import ConfigError, Fault
from thaw.config.load import ThawFile, load_config

__all__ = ["ConfigError", "Fault", "ThawFile", "load_config"]
