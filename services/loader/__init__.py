"""Load model weights into shared memory, once for all instances of a node."""
