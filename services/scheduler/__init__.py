"""The scheduler: one leader that owns the cluster's state and places models on devices."""
