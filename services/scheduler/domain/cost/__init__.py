"""What it takes for a model to become ready, by every way there is: the papers' formulas, and the parameters learned online."""
