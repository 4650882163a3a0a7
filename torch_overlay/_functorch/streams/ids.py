"""Number streams: the user's streams have registry indices, other numbers stand for streams that no frame names."""

from __future__ import annotations

import torch


CALLERS_STREAM = 0
COPY_STREAMS = 900_000
"""The copy streams of device d are this + 2 d (to the host) and this + 2 d + 1 (from the host)."""
_OTHER_DEVICE = 1_000_000
"""The caller's stream of a device that is not the current one is this plus the device's index."""


def copy_out_stream(device_index: int) -> int:
    return COPY_STREAMS + 2 * device_index


def copy_in_stream(device_index: int) -> int:
    return COPY_STREAMS + 2 * device_index + 1


def is_copy_stream(stream: int) -> bool:
    return COPY_STREAMS <= stream < _OTHER_DEVICE


def callers_stream_index(device_index: int) -> int:
    """Return the number of the stream that is current on a device when the region is entered."""
    return CALLERS_STREAM if device_index == torch.accelerator.current_device_index() else _OTHER_DEVICE + device_index


def callers_device(stream: int) -> int | None:
    """Return the device index of a caller's stream's number; None for a user's stream."""
    if stream == CALLERS_STREAM:
        return torch.accelerator.current_device_index()
    return stream - _OTHER_DEVICE if stream >= _OTHER_DEVICE else None
