"""Reports what is offloaded: to tools and tests as it is decided, and to the log, as information."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_overlay._functorch.offload.device_rates import Rates
    from torch_overlay._functorch.offload.plan import Choice

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OffloadedTensor:
    name: str  # of the node
    nbytes: int
    stack_trace: str


@dataclass(frozen=True)
class OffloadReport:
    """The decision for one forward and its backward."""

    rows: tuple[OffloadedTensor, ...]
    choice: Choice
    budget: int
    slab_bytes: int
    rates: Rates

    def summary(self) -> str:
        choice, link = self.choice, self.rates.link
        kind = "measured" if self.rates.measured else "estimated"
        again = f", {len(choice.recomputed)} are computed again" if choice.recomputed else ""
        return (
            f"{len(self.rows)} saved tensors, {choice.nbytes / 1e6:.1f} MB, wait on the host{again}; the peak of "
            f"forward and backward is {choice.peak / 1e6:.1f} MB by the plan, without offload "
            f"{choice.peak_before / 1e6:.1f} MB. "
            f"Link ({kind}): {link.out / 1e3:.1f} GB/s to the host, {link.back / 1e3:.1f} GB/s from it; "
            f"{100 * choice.hidden:.0f} % of the copies' time is hidden behind {choice.step_us / 1e3:.2f} ms of compute"
        )


@dataclass(frozen=True)
class CopySchedule:
    """The copies of one compiled graph. A row is (node, the step that its copy is launched before, the step that waits
    for the copy).

    A step is an operation of the final schedule, copies left out; `steps` is the number of steps. A copy to the host
    that no step waits for is waited for when the graph has run.
    """

    is_backward: bool
    steps: int
    rows: tuple[tuple[str, int, int], ...]

    def text(self, name: str) -> str:
        for known, launched, awaited in self.rows:
            if known == name:
                return f"{launched} / {awaited if awaited < self.steps else 'end'} of {self.steps}"
        return ""


_observers: list[Callable[[OffloadReport | CopySchedule], None]] = []


def subscribe(observer: Callable[[OffloadReport | CopySchedule], None]) -> Callable[[], None]:
    """Call `observer` with everything that is published from now on; call the result to unsubscribe."""
    _observers.append(observer)
    return lambda: _observers.remove(observer)


def publish(found: OffloadReport | CopySchedule) -> None:
    if isinstance(found, OffloadReport):
        log.info("%s", found.summary())
    for observer in tuple(_observers):
        observer(found)
