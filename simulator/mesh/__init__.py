"""The whole of the scheduler in the loop: `decide`, and the mesh's own messages. Import from the modules."""
