"""Number streams: the user's streams have registry indices, other numbers stand for streams that no frame names.

Note [Compiled on one rank]
Where code is compiled on one rank for all (`torch.compiler.config.compile_on_one_rank`), a process has one device, and
the code names no index of it: `written_index` is CURRENT_DEVICE, which `index_now` replaces by the index when the code
runs. Elsewhere code names its devices, as upstream's does.
"""

from __future__ import annotations

import torch


CALLERS_STREAM = 0
CURRENT_DEVICE = -1
COPY_STREAMS = 900_000
"""The copy streams of device d are this + 2 d (to the host) and this + 2 d + 1 (from the host)."""
_DEVICES = 1000  # the copy streams of the current device have the numbers of the last one
_OTHER_DEVICE = 1_000_000
"""The caller's stream of a device that is not the current one is this plus the device's index."""


def written_index(device_index: int) -> int:
    """Return the index by which code that is generated names a device: Note [Compiled on one rank]."""
    from torch.fx.experimental.proxy_tensor import _coor_enabled

    return CURRENT_DEVICE if _coor_enabled() else device_index


def index_now(written: int) -> int:
    """Return the index of the device that running code names."""
    return torch.accelerator.current_device_index() if written == CURRENT_DEVICE else written


def copy_out_stream(device_index: int) -> int:
    return COPY_STREAMS + 2 * (device_index % _DEVICES)


def copy_in_stream(device_index: int) -> int:
    return copy_out_stream(device_index) + 1


def copy_device(stream: int) -> tuple[int, bool]:
    """Return the device of a copy stream's number, and whether it copies from the host."""
    device, is_in = divmod(stream - COPY_STREAMS, 2)
    return CURRENT_DEVICE if device == _DEVICES - 1 else device, bool(is_in)


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
