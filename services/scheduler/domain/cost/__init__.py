"""Cost of making a model ready: the papers' formulas, and parameters learned online."""
