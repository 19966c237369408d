"""From a model's `source` to the place that its bytes are read from: local files, the cache, other nodes, remote tiers."""
