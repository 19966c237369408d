"""LoRA adapters of hosted engines: their files, and the engine's API for them."""
