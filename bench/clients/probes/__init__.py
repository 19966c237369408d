"""What each client library does with the gateway; a module runs in that library's environment."""
