"""Connection limits, protection against web pages, API keys, and error responses."""
