"""Devices that weights are brought to: host memory that engines map, or a GPU's own memory. Import from the modules."""
