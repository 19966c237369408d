"""Engine processes: how they are started, watched and ended."""
