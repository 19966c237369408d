"""Start Python modules as processes by fork from a server that has imported them."""
