"""Suspending engines: control groups that freeze them, and the ways by which they give their memory back and get it again."""
