"""The `thaw` command."""
