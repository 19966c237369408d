"""Engine processes: launch, watch and end."""
