"""The mesh on one machine: servers from their wheels, every service a process of its own, one supervisor over them."""
