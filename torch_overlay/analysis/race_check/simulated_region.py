"""Replace the native region (the boundary of generated code) by one on the simulated device's streams and events.

The simulation captures nothing, so the events for a caller's capture are ordinary ones. `SimulatedDevice.idle` sets
whether streams count as idle in a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_overlay._inductor.streams.runtime import EventRegion


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_overlay._inductor.streams.region_spec import RegionSpec
    from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice


class SimulatedEvent:
    """Replacement for `events.Event` of the C module: the lines of a region give it raw handles."""

    def __init__(self, region: SimulatedRegion) -> None:
        self.region, self.index = region, region.spec.device or 0
        self.event = torch.Event(device=torch.device("cuda", self.index))
        self.idle = False

    def _stream(self, stream: torch.cuda.Stream | int) -> torch.cuda.Stream:
        if isinstance(stream, torch.cuda.Stream):
            return stream
        if stream == 0:
            return torch.cuda.default_stream(self.index)
        return torch.cuda.ExternalStream(stream, device=self.index)

    def record(self, stream: torch.cuda.Stream | int) -> None:
        self.idle = False
        self.event.record(self._stream(stream))

    def record_busy(self, stream: torch.cuda.Stream) -> None:
        if self.region.are_idle([stream]):
            self.idle = True
        else:
            self.record(stream)

    def wait(self, stream: torch.cuda.Stream | int) -> None:
        if not self.idle:
            self.event.wait(self._stream(stream))

    wait_entry = wait

    def synchronize(self) -> None:
        self.event.synchronize()


class SimulatedRegion(EventRegion):
    def __init__(self, device: SimulatedDevice, spec: RegionSpec) -> None:
        super().__init__(spec)
        self.device = device

    def make_event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def are_idle(self, streams: Iterable[torch.cuda.Stream]) -> bool:
        self.device.asked_idle = True
        return self.device.idle and super().are_idle(streams)


__all__ = ["SimulatedRegion"]
