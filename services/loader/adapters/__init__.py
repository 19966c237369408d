"""I/O of the loader: disks, remote sources, shared memory, devices, peers."""
