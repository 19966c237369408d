"""Models that need no download: random weights in the layout of Hugging Face."""
