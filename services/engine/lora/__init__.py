"""LoRA adapters in an engine: their source, their memory, and their prefetch."""
