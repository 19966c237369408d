"""Model weights: formats, conversion, remote tiers, the SSD cache, the chunk pool, transfer into it, and device memory.

A library without a mesh. The loader service, `thaw load`, `thaw convert`, the vLLM plug-in and other programs use it. A chunk's way from the
disk to an engine reads top to bottom in `weights/transfer`.
"""
