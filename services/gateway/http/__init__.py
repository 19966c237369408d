"""HTTP as OpenAI clients expect it."""
