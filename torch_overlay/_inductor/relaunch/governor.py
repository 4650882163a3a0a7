"""Bounds the time that a region spends on making graphs: `Governor`.

Note [Time for graphs]
A capture takes the host as long as some forty calls, and a size may not come again. A region that has had up to two
sizes captures each at its second call; up to four (`FEW`), each that has come more often than there are sizes, which
lengths that are drawn hardly do. Where more have come, a size is captured when both hold:
1. Its calls without a graph have taken as long as a capture takes: it is a size that comes again.
2. The region can afford it. Its captures together take at most `SHARE` of the time of its calls without a graph, and
   the time that launches of its graphs have saved. So with graphs it is slower than without by no more than that share,
   beyond the captures of the few sizes, however its sizes are drawn.
Before the first capture, it is taken to last as long as `CALLS` calls. Each launch saves the difference between the
shortest call without a graph and the shortest of the first launches, which set the most nodes. All times are the
host's, which a graph relieves: where the device takes longer than the host, neither a capture nor a launch delays it.
Warm-ups, which load kernels, are no measure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable

FEW = 4
SHARE = 0.03
CALLS = 40


def has_to_earn(sizes: int, calls: int) -> bool:
    """True if a size of so many, which had so many calls, is captured only when the region can afford it."""
    return sizes > FEW or (sizes > FEW // 2 and calls < sizes)


class Governor:
    """The account of a region, in seconds of the host. `spent`: on captures, failed ones too; `capture`: on the latest;
    `without`: in calls without a graph."""

    def __init__(self) -> None:
        self.spent = self.capture = self.without = 0.0
        self._call = self._launch = float("inf")  # the shortest

    def note_call(self, seconds: float) -> None:
        self.without += seconds
        if seconds < self._call:
            self._call = seconds

    def note_first_launch(self, seconds: float) -> None:
        self._launch = min(self._launch, seconds)

    def note_capture(self, seconds: float) -> None:
        self.spent, self.capture = self.spent + seconds, seconds

    def saved(self, launches: int) -> float:
        """Return the seconds that so many launches have saved: none before a call without a graph, warm-ups apart."""
        return launches * max(self._call - self._launch, 0.0) if self._call < float("inf") else 0.0

    def affords_capture(self, waited: float, launches: Callable[[], int]) -> bool:
        """True if a size may be captured. `waited`: seconds of its calls without a graph; `launches()`: those of the
        region's graphs so far."""
        capture = self.capture or CALLS * self._call
        if waited < capture:
            return False
        return self.spent + capture <= SHARE * self.without + self.saved(launches())
