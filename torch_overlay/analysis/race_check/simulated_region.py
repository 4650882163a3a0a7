"""Replace the native region (the boundary of generated code) by one on the simulated device's streams and events.

The simulation captures nothing, so the events for a caller's capture are ordinary ones. `SimulatedDevice.idle` sets
whether streams count as idle in a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_overlay._inductor.streams.runtime import EventFrame, EventRegion


if TYPE_CHECKING:
    from typing import Any

    from torch_overlay._inductor.streams.runtime import Spec
    from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice


class SimulatedEvent:
    """Replacement for `events.Event` of the C module: its methods take raw stream handles."""

    def __init__(self, device: SimulatedDevice, index: int) -> None:
        self.device, self.index = device, index
        self.event = torch.Event(device=torch.device("cuda", index))
        self.idle = False

    def _stream(self, raw_stream: int) -> torch.cuda.Stream:
        if raw_stream == 0:
            return torch.cuda.default_stream(self.index)
        return torch.cuda.ExternalStream(raw_stream, device=self.index)

    def record(self, raw_stream: int) -> None:
        self.idle = False
        self.event.record(self._stream(raw_stream))

    def record_busy(self, raw_stream: int) -> None:
        self.device.asked_idle = True
        self.idle = self.device.idle and self._stream(raw_stream).query()
        if not self.idle:
            self.record(raw_stream)

    def wait(self, raw_stream: int) -> None:
        if not self.idle:
            self.event.wait(self._stream(raw_stream))

    record_entry = record
    wait_entry = wait_exit = wait

    def synchronize(self) -> None:
        self.event.synchronize()


class SimulatedFrame(EventFrame):
    def __init__(self, region: SimulatedRegion) -> None:
        super().__init__(region)
        self.device = region.device
        self.multi_stream = True

    def begin(self) -> None:
        self.multi_stream = self.region.spec.idle_streams is None or not self._holds_nothing()
        if self.multi_stream:
            super().begin()

    def end(self) -> None:
        spec = self.region.spec
        if self.multi_stream:
            super().end()
        elif spec.idle_streams:
            caller = next(iter(spec.streams))
            self.run([("record", "ev0", caller), *(("wait", "ev0", name) for name in spec.idle_streams)])

    def _holds_nothing(self) -> bool:
        """True if the streams are idle: Note [Streams can't pay on an idle device]."""
        device, idle_streams = self.device, self.region.spec.idle_streams or ()
        device.asked_idle = True
        caller = next(iter(self.streams.values()))
        return (
            device.idle
            and not self.is_aliased
            and all(s.query() for s in (caller, *(self.streams[name] for name in idle_streams)))
        )

    def handle(self, stream: str) -> Any:
        return self.streams[stream].cuda_stream

    def result(self, name: str) -> Any:
        if name.startswith("multi_stream"):
            return self.multi_stream
        if name.endswith("_raw") and not self.multi_stream:
            return next(iter(self.streams.values())).cuda_stream
        return super().result(name)


class SimulatedRegion(EventRegion):
    frame = SimulatedFrame

    def __init__(self, device: SimulatedDevice, spec: Spec) -> None:
        super().__init__(spec)
        self.device = device

    def make_event(self) -> SimulatedEvent:
        return SimulatedEvent(self.device, self.spec.device or 0)


__all__ = ["SimulatedRegion"]
