"""Load, store, convert and verify model weights.

The library covers formats, conversion, remote tiers, the SSD cache, the chunk pool, the transfer
into it, and device memory. It does not need a mesh: the loader service, `thaw load`, `thaw
convert`, the vLLM plug-in and other programs use it. A chunk's way from the disk to an engine reads
top to bottom in `weights/transfer`.
"""
