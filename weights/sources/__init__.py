"""Find the place to read a model's bytes from, given its `source`.

Such places are local files, the cache, other nodes and remote tiers.
"""
