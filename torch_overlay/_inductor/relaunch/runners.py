"""Lists the runners and graphs of the process, has them forgotten by `torch._dynamo.reset()`, and counts them.

A reset calls `reset` of each backend that Dynamo has met, and then forgets the backends. So a listener is put among
these, without a seam, and again whenever there is something new to forget.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch_overlay._inductor.relaunch.capture import recording
from torch_overlay._inductor.relaunch.launch import relaunch


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_overlay._inductor.relaunch.runner import Runner


_forgetting: list[Callable[[], None]] = []


class _Listener:
    """Stands among the backends."""

    def reset(self) -> None:
        for forget in _forgetting:
            forget()


_listener = _Listener()


def on_reset(forget: Callable[[], None]) -> Callable[[], None]:
    """Decorate a function that a reset is to call, once for each reset that `listen` was called before."""
    _forgetting.append(forget)
    return forget


def listen() -> None:
    """Have the next reset heard. Does nothing if it is heard already."""
    from torch._dynamo.eval_frame import cached_backends

    cached_backends.setdefault(id(_listener), _listener)  # pyrefly: ignore[no-matching-overload]


known: weakref.WeakSet[Runner] = weakref.WeakSet()


@on_reset
def forget_all() -> None:
    """Drop the graphs of all runners. Compiled code may still be referenced, by a backward yet to run, or by Dynamo
    after a graph break: its runners make new ones."""
    for runner in list(known):
        runner.forget()


def counts() -> dict[str, int]:
    """Return how many runners with states, templates, executables and address ranges live."""
    return {
        "runners": sum(bool(runner.states) for runner in list(known)),
        "templates": len(relaunch.live_relaunches),
        "ranges": sum(r.is_open for r in recording.live_recordings),
    }


def stats() -> dict[str, int]:
    """Return totals over the live graphs."""
    alive = list(relaunch.live_relaunches)
    return {
        "nodes": sum(r.nodes for r in alive),
        "nodes_patched": sum(r.totals[1] for r in alive),
        "relaunches": sum(r.totals[0] for r in alive),
    }


def bare_replays() -> list[Callable[[], None]]:
    """Return functions that launch the live graphs without patching any pointer, for benchmarks."""
    return [r.replay for r in list(relaunch.live_relaunches) if r.totals[0]]
