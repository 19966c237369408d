"""LoRA adapters in an engine: their source and their cache."""
