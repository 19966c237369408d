"""From the bytes of an HTTP body to a validated request, at a bounded cost."""
