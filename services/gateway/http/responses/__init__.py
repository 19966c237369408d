"""Writers of HTTP responses: event streams, buffered JSON, pass-through."""
