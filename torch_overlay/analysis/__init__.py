"""Analyse a program's streams: find races, show what runs when, measure overlap on a device.

    from torch_overlay.analysis import check, check_eager, check_graph, timeline, Timeline

`check` runs compiled code on a simulated device, `check_graph` reads a captured CUDA graph, `check_wrapper` takes the
text of a generated module, `check_eager` watches eager code on a GPU; each returns a `Report`. `check_trace` checks a
`Trace` that was written by hand. `timeline` makes the timeline of a call of a function, `Timeline.from_profile` that of
a profile.
"""

from __future__ import annotations

from typing import Any


_PUBLIC = {
    "check": "race_check.checking",
    "check_eager": "race_check.eager_check",
    "check_graph": "race_check.graph_check",
    "check_step": "race_check.wrapper_check",
    "check_trace": "race_check.race_report",
    "check_wrapper": "race_check.wrapper_check",
    "LostPromiseError": "race_check.race_report",
    "memory_blocks": "memory_report",
    "profiler": "timelines.timeline",
    "RaceError": "race_check.race_report",
    "Report": "race_check.race_report",
    "Timeline": "timelines.timeline",
    "timeline": "timelines.timeline",
    "Trace": "race_check.trace",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
