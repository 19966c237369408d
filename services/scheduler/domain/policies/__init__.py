"""The scheduling policy: pure modules over the views of `port`."""
