"""The scheduler: one leader that owns the cluster's state and decides who sits on which device."""
