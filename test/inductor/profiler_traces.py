"""Reads the ranges of `profiler_ranges`, and what they launched, from a Chrome trace of torch.profiler."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch


Event = dict[str, Any]
OURS = re.compile(r"(forward|backward|inference) of compiled frame|side stream")
ROUNDING = 0.01  # us


def traced(profiler: torch.profiler.profile, **options: Any) -> list[Event]:
    """Events of the trace that a profiler exports."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace), **options)
        return read(trace)


def read(trace: Path) -> list[Event]:
    return json.loads(trace.read_text())["traceEvents"]


def ranges(events: list[Event]) -> list[Event]:
    """Our ranges on the host, in order."""
    shown = [e for e in events if e.get("cat") == "user_annotation" and OURS.match(e["name"])]
    return sorted(shown, key=lambda event: (event["ts"], -event["dur"]))


def is_within(inner: Event, outer: Event) -> bool:
    is_same = (inner["pid"], inner["tid"]) == (outer["pid"], outer["tid"])
    begins, ends = inner["ts"] - outer["ts"], outer["ts"] + outer["dur"] - inner["ts"] - inner["dur"]
    return is_same and min(begins, ends) > -ROUNDING


def tree(events: list[Event]) -> list[str]:
    """Names of our ranges, indented by their depth."""
    shown = ranges(events)
    return ["  " * (sum(is_within(each, other) for other in shown) - 1) + each["name"] for each in shown]


def work_of(events: list[Event], shown: Event) -> list[Event]:
    """What a range launched on the device: by the correlation of the launches inside, or, where the profiler records no
    launch by the driver's own function, below the range's shadow on the device.
    """
    done = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
    launched = {e["args"].get("correlation") for e in calls if is_within(e, shown)} - {None}
    alike = [e for e in events if e.get("cat") == "gpu_user_annotation" and e["name"] == shown["name"]]
    shadows = [e for e in alike if e["args"].get("External id") in (None, shown["args"]["External id"])]
    below = [e for e in done if any(is_within(e, shadow) for shadow in shadows)]
    return [e for e in done if e["args"].get("correlation") in launched] or below
