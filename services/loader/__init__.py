"""The loader of a node: brings the weights of models into shared memory, once for all instances that hold them."""
