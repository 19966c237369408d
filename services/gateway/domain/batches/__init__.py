"""Files and batches of API keys: state and decisions."""
