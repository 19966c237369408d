"""The loader of a node: loads model weights into shared memory, once for all instances that use them."""
