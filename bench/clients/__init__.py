"""Client libraries that people use, each with its newest version, against Thaw's gateway."""
