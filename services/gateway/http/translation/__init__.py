"""Translation of other APIs to chat completions and of their responses back, without I/O."""
