"""The state of one client request, from its validation to its log entry."""
