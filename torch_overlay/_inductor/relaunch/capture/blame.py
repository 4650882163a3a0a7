"""Makes the graph of a region, or captures it once more to find the operator for which it has none.

Note [Kernels outside of a capture]
A custom operator may launch on another stream than the current one: on the default stream, as CUDA code that names no
stream does, or on one that it remembers. Nobody notices while that is the current one. In a capture, such a launch is
not recorded: the kernel runs at once, on placeholder addresses, and never again. CUDA doesn't tell. But a capture runs
no kernel, so nothing writes to the memory behind the placeholder addresses. A region that calls operators that are not
torch's is first captured once with that memory filled with numbers. If some have changed when all kernels have run, an
operator has launched one outside, on whatever stream. Which one it was, shorter captures show, each of which stops
after an operator. The numbers are small, for a kernel outside that takes them for indices must not read elsewhere.

It escapes that probe if it writes only to memory that the operator keeps for itself, or leaves the numbers as they are.
So such a region's graph is launched once on copies of the inputs, and compared with the compiled code. Where they
differ, any operator that isn't torch's may be to blame. The middle one is split off; the parts are compared in turn, so
it takes as many steps as a bisection. The probe stays: it names the operator, and sees results that no kernel writes.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.capture.capture import Capture
from torch_overlay._inductor.relaunch.capture.culprit import DIFFERS, line_of_error, Suspects
from torch_overlay._inductor.relaunch.capture.make_graph import make_graph, recordings
from torch_overlay._inductor.relaunch.causes import log
from torch_overlay._inductor.relaunch.launch.relaunch import Relaunch
from torch_overlay._inductor.relaunch.launch.staged import graph_of, Split
from torch_overlay._inductor.relaunch.numbers.traced import NumberEscaped
from torch_overlay._inductor.relaunch.proof.nodes import Unprovable


if TYPE_CHECKING:
    from torch_overlay._inductor.relaunch.capture.capture import CaptureRequest
    from torch_overlay._inductor.relaunch.capture.culprit import Culprit


class CaptureFailed(Exception):
    """A region has no graph. `reason`: a code of `causes`; `culprit`: the operator that is to blame, if one is;
    `operator` and `line`: where it failed otherwise, if that is known; `is_final`: False if another capture may do."""

    def __init__(
        self,
        reason: str,
        message: str,
        culprit: Culprit | None,
        operator: str = "",
        line: str = "",
        is_final: bool = True,
    ) -> None:
        super().__init__(message)
        self.reason, self.operator, self.line, self.is_final = reason, operator, line, is_final
        self.culprit = None if culprit is None or culprit.is_innocent else culprit


def make_or_blame(request: CaptureRequest) -> Relaunch | Split:
    """Make the graph of a region, and return what launches it. Raises CaptureFailed; NumberEscaped if a launch can't
    compute with the numbers."""
    try:
        if request.plan.opaque and (culprit := find_escape(request)) is not None and not culprit.is_innocent:
            raise CaptureFailed("operator", culprit.did, culprit)
        arrangement, executables = make_graph(request)
        if arrangement.stages:
            made: Relaunch | Split = Split(request.device, arrangement, executables, request.alignments)
        else:
            made = Relaunch(request.device, arrangement.layout, executables[0], request.alignments)
    except (NumberEscaped, CaptureFailed):
        raise
    except Unprovable as refusal:
        raise CaptureFailed(refusal.reason, str(refusal), find_launcher(request, refusal)) from refusal
    except Exception as error:
        log.info("%s could not be captured", request.code.name, exc_info=True)
        culprit = find_culprit(request)
        reason = "out-of-memory" if isinstance(error, torch.OutOfMemoryError) else "capture"
        operator, line = "", line_of_error(error, request.namespace)
        if culprit is not None:
            operator, line = culprit.operator, culprit.line
        raise CaptureFailed(
            reason, f"{type(error).__name__}: {error}", culprit, operator, line, is_final=False
        ) from error
    if log.isEnabledFor(logging.INFO):
        message = "%s: a graph of %d nodes in %d launches, which allocate %s; %s"
        nodes, names = graph_of(made).nodes, arrangement.layout.names()
        log.info(message, request.code.name, nodes, len(executables), arrangement.describe(), names)
    return made


def find_culprit(request: CaptureRequest) -> Culprit | None:
    """Capture as the first capture of `make_graph` does, and return the operator in which that fails."""
    suspects = Suspects(request.namespace, request.device.is_capture_broken)
    with contextlib.suppress(Exception), recordings(request) as new_recording, suspects:
        Capture(request, new_recording(1)).run()
    return suspects.found


def find_escape(request: CaptureRequest) -> Culprit | None:
    """Return the operator in which a capture fails, or which launches outside of it: Note [Kernels outside of a
    capture]."""

    suspects, is_written = _capture_filled(request)
    if suspects.found is not None or not is_written or not suspects.opaque:
        return suspects.found
    others = range(len(suspects.opaque) - 1)
    return suspects.opaque[bisect.bisect_left(others, True, key=lambda last: _capture_filled(request, last)[1])]


def _capture_filled(request: CaptureRequest, last: int | None = None) -> tuple[Suspects, bool]:
    """Capture up to this call of an opaque operator. Return what was seen, and whether a kernel has run."""
    suspects = Suspects(request.namespace, request.device.is_capture_broken, last)
    with recordings(request) as new_recording, new_recording(1) as recording:
        recording.fill()
        with contextlib.suppress(Exception), suspects:
            Capture(request, recording).run()
        return suspects, recording.is_written()


def find_differing(request: CaptureRequest) -> Culprit | None:
    """Return the operator in the middle of those that may have made a graph's results other ones: Note [Kernels outside
    of a capture]."""
    with contextlib.suppress(Exception):
        opaque = list({culprit.operator: culprit for culprit in _capture_filled(request)[0].opaque}.values())
        return dataclasses.replace(opaque[len(opaque) // 2], did=DIFFERS)
    return None


def find_launcher(request: CaptureRequest, refusal: Unprovable) -> Culprit | None:
    """Capture once more, and return the operator that launches the node for which the proof has refused the region."""
    number = refusal.node.partition(" ")[0]
    if not number.isdigit():
        return None
    with contextlib.suppress(Exception), recordings(request) as new_recording:
        recording = new_recording(1)
        with Suspects(request.namespace, lambda: False, nodes=recording.nodes) as suspects:
            captured = Capture(request, recording).run()
        did = f"launches a kernel that can't be relaunched [{refusal.reason}]"
        return suspects.launcher(request.device.read(captured).nodes[int(number)].handle, did)
    return None
