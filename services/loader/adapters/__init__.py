"""Where the loader touches the world: disks, the Hugging Face hub, shared memory."""
