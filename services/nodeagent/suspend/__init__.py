"""Suspending engines: control groups that freeze them, and the methods that free and restore their memory."""
