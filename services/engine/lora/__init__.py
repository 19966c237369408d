"""LoRA adapters in an engine: where they are loaded from, and the cache that holds them."""
