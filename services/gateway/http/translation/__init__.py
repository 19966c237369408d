"""Translation of other APIs to OpenAI's and of their responses back, without I/O."""
