"""Element types by name: what they weigh, and what torch calls them."""

from __future__ import annotations

SAFETENSORS_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Bits of one element of each type that a safetensors file may hold, by safetensors' names."""

TORCH_ONLY_BITS = {"C32": 32, "C128": 128, "BITS8": 8, "BITS1X8": 8, "BITS2X4": 8, "BITS4X2": 8, "BITS16": 16}
"""Types that torch saves and safetensors does not know: only converted checkpoints hold them."""

DTYPE_BITS = {**SAFETENSORS_BITS, **TORCH_ONLY_BITS}

TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C32": "complex32",
    "C64": "complex64",
    "C128": "complex128",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
    "BITS8": "bits8",
    "BITS1X8": "bits1x8",
    "BITS2X4": "bits2x4",
    "BITS4X2": "bits4x2",
    "BITS16": "bits16",
}
"""Types as attributes of the torch module.

F4 is packed in pairs there: its last dimension is half as long. F6 has none.
"""


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of `shape`.

    As in torch, a dimension of length 0 counts as 1.
    """
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(1, length)
    return tuple(reversed(strides))


def packed_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that torch gives a tensor of `shape`: two elements of F4 count as one.

    None where it has no such tensor.
    """
    if dtype != "F4":
        return shape
    return (*shape[:-1], shape[-1] // 2) if shape and shape[-1] % 2 == 0 else None
