"""Compares values by type and bits: True is not 1, 1 is not 1.0, 0.0 is not -0.0, and a NaN is itself."""

from __future__ import annotations

import struct
from typing import Any


bits_of = struct.Struct("<d").pack


def exact(value: Any) -> Any:
    """Return an object that equals that of another value if and only if both have the same type and the same bits."""
    kind = type(value)
    if kind is int:
        return value
    if isinstance(value, float):
        return kind, bits_of(value)
    if isinstance(value, complex):
        return kind, bits_of(value.real), bits_of(value.imag)
    if isinstance(value, (tuple, list)):
        return kind, tuple(map(exact, value))
    return kind, value
