"""Engines of several ranks on several nodes: how their hosts find and watch each other."""
