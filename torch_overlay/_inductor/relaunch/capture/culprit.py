"""Makes the graph of a region, or captures it once more to find the operator for which it has none.

Generated code calls libraries, custom operators and what it has no kernel for through torch's dispatcher, where a
dispatch mode sees each call. After each, the stream is asked whether the capture is still whole: an operator may break
it without an error. The line of generated code that made the call leads to the line of the user's program.

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
import sys
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_overlay._inductor.relaunch.capture.allocations import OURS
from torch_overlay._inductor.relaunch.capture.capture import Capture
from torch_overlay._inductor.relaunch.capture.make_graph import make_graph, recordings
from torch_overlay._inductor.relaunch.causes import log
from torch_overlay._inductor.relaunch.launch.relaunch import graph_of, Relaunch, Split
from torch_overlay._inductor.relaunch.numbers.traced import NumberEscaped
from torch_overlay._inductor.relaunch.proof.nodes import Unprovable
from torch_overlay._inductor.user_lines import is_in_torch


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType, TracebackType

    from torch_overlay._inductor.relaunch.capture.capture import CaptureRequest


# CUDA's errors about captures, by code: the beginning of CUDA's text, and what the operator did.
ERRORS: dict[int, tuple[str, str]] = {
    900: (
        "operation not permitted when stream is capturing",
        "waits for the device, or allocates or frees its memory itself",
    ),
    901: ("operation failed due to a previous error during capture", "goes on after the capture has failed"),
    902: ("operation would result in a merge of separate capture", "joins the capture with another one"),
    903: ("capture was not ended in the same stream", "ends the capture on another stream"),
    904: ("capturing stream has unjoined work", "launches on another stream that nothing waits for"),
    905: ("dependency created on uncaptured work", "waits for work that was launched before the capture"),
    906: ("operation would make the legacy stream depend", "launches on the default stream"),
    907: ("operation not permitted on an event last recorded in a capturing", "asks for an event of the capture"),
    908: ("attempt to terminate a thread-local capture", "ends the capture in another thread"),
}

ESCAPES = "launches on a stream of its own choice, where a capture does not see it"
DIFFERS = (
    "is called where a graph's first launch had other results than the compiled code: it, or another operator there, "
    "launches where a capture does not see it, or has other results each time; "
    "launch on torch.cuda.current_stream(), and keep no state"
)


@dataclass(frozen=True)
class Culprit:
    operator: str  # name of the overload, "mylib::op.default"
    line: str  # "file:line" of the user's program, or empty
    did: str  # what it did, as the end of a sentence about it
    is_innocent: bool = False  # splitting it off would be wrong: there was no memory, or all models are made of it


class Stopped(Exception):
    """A capture has gone as far as it was to."""


class Suspects(TorchDispatchMode):
    """A dispatch mode for another capture of what a graph is refused for, of the generated module with these globals.
    `found` is the first operator that raises, or after which `is_broken()`. `opaque` are the calls of operators that
    are not torch's; after call `last` of these, the capture is stopped. If `nodes()` returns the handles of the nodes
    that the graph has so far, `made` has the operator and the line of each."""

    supports_higher_order_operators = True

    def __init__(
        self,
        namespace: Mapping[str, Any],
        is_broken: Callable[[], bool],
        last: int | None = None,
        nodes: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        super().__init__()
        self.namespace, self.is_broken, self.last, self.nodes = namespace, is_broken, last, nodes
        self.found: Culprit | None = None
        self.opaque: list[Culprit] = []
        self.made: dict[int, tuple[Any, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = set(self.nodes())
        try:
            result = func(*args, **(kwargs or {}))
        except Exception as error:
            self._note(func, error)
            raise
        if self.found is None and self.is_broken():
            self._note(func, None)
        new = [node for node in self.nodes() if node not in before]
        if new and (line := line_of_call(self.namespace)) is not None:
            self.made |= dict.fromkeys(new, (func, line))
        if getattr(func, "namespace", "") not in OURS:
            self.opaque.append(Culprit(name_of(func), line_of_call(self.namespace) or "", ESCAPES))
            if len(self.opaque) - 1 == self.last:
                raise Stopped
        return result

    def _note(self, func: Any, error: Exception | None) -> None:
        line = line_of_call(self.namespace)
        if self.found is None and line is not None:
            innocent = isinstance(error, torch.OutOfMemoryError) or is_core(func)
            self.found = Culprit(name_of(func), line, did(error), innocent)

    def launcher(self, node: int, did: str) -> Culprit | None:
        """Return the operator that made the node."""
        func, line = self.made.get(node, (None, ""))
        return None if func is None else Culprit(name_of(func), line, did, is_core(func))


def is_core(func: Any) -> bool:
    """True for operators that most models are made of. To split off each product, now and in later processes, for what
    may have happened once, is worse than no graph."""
    return torch.Tag.core in getattr(func, "tags", ())


def line_of_call(namespace: Mapping[str, Any]) -> str | None:
    """Return the user's line for the call that the generated module with these globals makes now; None if there is no
    such call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals is not namespace:
        frame = frame.f_back
    return None if frame is None else user_line(frame.f_code.co_filename, frame.f_lineno)


def name_of(func: Any) -> str:
    """Return "namespace::name.overload" of an operator; the plain name of a higher-order operator."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return func.name() if callable(getattr(func, "name", None)) else str(func)
    return f"{schema.name}.{schema.overload_name or 'default'}"


def did(error: BaseException | None) -> str:
    """Return what an operator did that raised this error in a capture."""
    if error is None:
        return "breaks the capture"
    code = getattr(error, "error_code", None)
    text = str(error)
    for number, (begin, what) in ERRORS.items():
        if code == number or begin in text:
            return f"{what} (CUDA error {number})"
    lines = text.strip().splitlines() or [""]
    return f"raises {type(error).__name__}: {lines[0]}"


def user_line(path: str, line: int) -> str:
    """Return "file:line" of the user's program for a line of generated code; empty if it is not known."""
    from torch._inductor.codecache import PyCodeCache

    frames = PyCodeCache.stack_frames_for_code(path, line) or []
    ours = [frame for frame in frames if not is_in_torch(frame["filename"])] or frames
    return f"{ours[0]['filename']}:{ours[0]['line']}" if ours else ""


def line_of_error(error: BaseException, namespace: Mapping[str, Any]) -> str:
    """Return the line of the user's program whose code raised this error."""
    trace: TracebackType | None = error.__traceback__
    found = ""
    while trace is not None:
        if trace.tb_frame.f_globals is namespace:
            found = user_line(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found


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
