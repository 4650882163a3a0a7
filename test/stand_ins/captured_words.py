"""Addresses and parameter words as a capture would have them."""

import struct

import form  # noqa: F401
from torch_overlay._inductor.relaunch.proof.nodes import Segment


GRANULE = 2 << 20
LOW = {"a": 0x7D0000000000, "b": 0x7A0000000000}
SPAN = 1 << 38
KIB = 1024


def u64(*values):
    return struct.pack(f"<{len(values)}Q", *(v % (1 << 64) for v in values))


def u32(*values):
    return struct.pack(f"<{len(values)}I", *values)


def memory(which, *, regions=((0, 4 * KIB), (1, 8 * KIB), (2, 64 * KIB)), gap=None):
    """Segments of a capture, one per (region, size), unmapped granules between them."""
    address, segments = LOW[which] + GRANULE, []
    gap = {"a": 1, "b": 3}[which] if gap is None else gap
    for region, size in regions:
        segments.append(Segment(address, size, region))
        address += -(-size // GRANULE) * GRANULE + gap * GRANULE
    return tuple(segments)


def slots(found):
    return [(s.node, s.parameter, s.offset, s.region, s.delta) for s in found.slots]
