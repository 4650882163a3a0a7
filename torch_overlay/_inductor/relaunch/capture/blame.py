"""Makes the graph of a region, or captures it once more to find the operator for which it has none.

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
import logging
import time
from typing import TYPE_CHECKING

import torch

from torch_overlay._inductor.relaunch.capture.culprit import Launchers, line_of_error, other_threads_run, Suspects
from torch_overlay._inductor.relaunch.capture.make_graph import make_graph, recordings
from torch_overlay._inductor.relaunch.launch import staged
from torch_overlay._inductor.relaunch.numbers.traced import Escaped
from torch_overlay._inductor.relaunch.proof.nodes import Refusal
from torch_overlay._inductor.relaunch.refusals import log


if TYPE_CHECKING:
    from torch_overlay._inductor.relaunch.capture.culprit import Culprit
    from torch_overlay._inductor.relaunch.capture.make_graph import Work
    from torch_overlay._inductor.relaunch.launch.relaunch import Relaunch


class NoGraph(Exception):
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


def make_or_blame(work: Work) -> Relaunch | staged.Split:
    """Make the graph of a region, and return what launches it. Raises NoGraph; Escaped if a launch can't compute with
    the numbers."""
    if work.plan.opaque and not other_threads_run():
        culprit = find_culprit(work, blocking=True)
        if culprit is not None and not culprit.is_innocent:
            raise NoGraph("operator", culprit.did, culprit)
    try:
        start = time.perf_counter()
        arrangement, launchers = make_graph(work)
        if work.is_shared:
            work.sizes.note_capture(time.perf_counter() - start)
        made = staged.launchable(work.device, arrangement, launchers, work.code.static_inputs, work.alignments)
    except Escaped:
        raise
    except Refusal as refusal:
        raise NoGraph(refusal.reason, str(refusal), find_launcher(work, refusal)) from refusal
    except Exception as error:
        log.info("%s could not be captured", work.code.name, exc_info=True)
        culprit = find_culprit(work)
        reason = "out-of-memory" if isinstance(error, torch.OutOfMemoryError) else "capture"
        operator, line = "", line_of_error(error, work.namespace)
        if culprit is not None:
            operator, line = culprit.operator, culprit.line
        raise NoGraph(reason, f"{type(error).__name__}: {error}", culprit, operator, line, is_final=False) from error
    if log.isEnabledFor(logging.INFO):
        message = "%s: a graph of %d nodes in %d launches, which allocate %s; %s"
        nodes, names = staged.graph_of(made).nodes, arrangement.layout.names()
        log.info(message, work.code.name, nodes, len(launchers), arrangement.describe(), names)
    return made


def find_culprit(work: Work, blocking: bool = False) -> Culprit | None:
    """Capture as the first capture of `make_graph` does, and return the operator in which that fails. `blocking`: while
    nothing may be launched on the default stream. Note [Opaque operators]"""
    suspects = Suspects(work.namespace, work.device.is_capture_broken)
    with contextlib.suppress(Exception), recordings(work) as record:
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
    with contextlib.suppress(Exception), recordings(work) as record:
        recording = record(1)
        with Launchers(work.namespace, recording.nodes) as launchers:
            captured = work.capture(recording)
        did = f"launches a kernel that can't be relaunched [{refusal.reason}]"
        return launchers.culprit(work.device.handle_of(captured, int(number)), did)
    return None
