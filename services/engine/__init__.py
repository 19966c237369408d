"""The builtin engine: one process serves one model with torch and transformers."""
