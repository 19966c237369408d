"""The scheduler without a cluster: its own decisions, on devices, links and requests that are simulated event by event. Import from the modules."""
