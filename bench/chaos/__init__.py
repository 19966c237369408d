"""A campaign of random faults against a whole mesh under load, and what its clients saw of them."""
