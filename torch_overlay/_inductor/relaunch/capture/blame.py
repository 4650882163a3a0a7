"""Captures a region once more to find the operator for which it has no graph.

Note [Opaque operators]
A custom operator may launch on the default stream whatever the current stream is, as CUDA code that names no stream
does. Nobody notices while the default stream is the current one. In a capture, such a launch is not recorded: the
kernel would run at once, on placeholder addresses, and the illegal access would end the process. So a region that
calls operators that are not torch's is first captured on a stream that the default stream waits for: CUDA refuses
launches on the default stream while such a stream is captured, and the operator is found like any other in which a
capture fails. CUDA refuses those of other threads, too; so while other threads run, there is no such capture.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch_overlay._inductor.relaunch.capture.culprit import Launchers, Suspects
from torch_overlay._inductor.relaunch.capture.make_graph import recordings


if TYPE_CHECKING:
    from torch_overlay._inductor.relaunch.capture.culprit import Culprit
    from torch_overlay._inductor.relaunch.capture.make_graph import Work
    from torch_overlay._inductor.relaunch.proof.nodes import Refusal


def find_culprit(work: Work, blocking: bool = False) -> Culprit | None:
    """Capture as the first capture of `make_graph` does, and return the operator in which that fails. `blocking`: while
    nothing may be launched on the default stream. Note [Opaque operators]"""
    suspects = Suspects(work.namespace, work.device.is_capture_broken)
    with contextlib.suppress(Exception), recordings(work.device) as record:
        recording = record(1)
        recording.blocking = blocking
        with suspects:
            work.capture(recording)
    return suspects.found


def find_launcher(work: Work, refusal: Refusal) -> Culprit | None:
    """Capture once more, and return the operator that launches the node for which the proof has refused the region."""
    number = refusal.node.partition(" ")[0]
    if not number.isdigit():
        return None
    with contextlib.suppress(Exception), recordings(work.device) as record:
        recording = record(1)
        with Launchers(work.namespace, recording.nodes) as launchers:
            captured = work.capture(recording)
        did = f"launches a kernel that can't be relaunched [{refusal.reason}]"
        return launchers.culprit(work.device.handle_of(captured, int(number)), did)
    return None
