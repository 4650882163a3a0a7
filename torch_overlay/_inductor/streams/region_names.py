"""Collect the names that the lines of a region use, and define the region for the runtime by them.

A region looks up streams and events in one call where it is entered, `enter`, which returns those that its lines use:

    frame0, stream1_raw, ev0, = _region0.enter()

So the lines are written first, and each name is noted when it is used. When all are known, the region is defined in the
header of the generated module: its streams, its events, and what is recorded and waited for where it is entered and
left. Names of a further region in the same code have its number.

Write the statements of a generated module that define its regions, and those that name what the runtime has.
"""

from __future__ import annotations

import pprint
import textwrap
from typing import Any, TYPE_CHECKING

import torch
import torch._inductor.config as inductor_config
from torch._inductor.virtualized import V

from torch_overlay._functorch.streams.ids import (
    callers_device,
    callers_stream_index,
    copy_device,
    CURRENT_DEVICE,
    is_copy_stream,
    written_index,
)
from torch_overlay._inductor.notes import WrapperNotes
from torch_overlay._inductor.streams.graph_facts import stream_devices


if TYPE_CHECKING:
    from torch_overlay._inductor.streams.planned_region import PlannedRegion


RUNTIME = "from torch_overlay._inductor.streams.runtime import region, restore_stream, set_stream"


def root_of(wrapper: Any) -> Any:
    while hasattr(wrapper, "parent_wrapper"):
        wrapper = wrapper.parent_wrapper
    return wrapper


Operation = tuple[str, str, str]
"""An operation on an event and a stream at a region's boundary: ("wait", "ev0", "stream1")."""


def declare_runtime(root: Any) -> None:
    if not root.imports.contains(RUNTIME):
        root.imports.writeline(RUNTIME)


def define_region(root: Any, name: str, **fields: Any) -> None:
    """Write the statement that defines a region into the generated module's header; empty fields are left out."""
    root.header.writeline(f"{name} = region(")
    for key, value in fields.items():
        if value or key in ("device", "streams") or value == () and key == "idle_streams":
            text = pprint.pformat(value, width=100, compact=True, sort_dicts=False)
            root.header.writelines(textwrap.indent(f"{key}={text},", "    ").splitlines())
    root.header.writeline(")")


def record_stream_text(name: str, stream: str) -> str:
    """Return a `record_stream` statement, skipped while capturing: memory of a captured graph isn't reused by the
    allocator. Seeds of attention may be in host memory (`relaunch.attention_seeds`).
    """
    conditions = ["not torch.cuda.is_current_stream_capturing()"] * inductor_config.triton.cudagraphs
    buffer = V.graph.try_get_buffer(name)
    if buffer is not None and buffer.maybe_get_dtype() is torch.int64 and buffer.maybe_get_size() == []:
        conditions.append(f"{name}.is_cuda")
    text = f"{name}.record_stream({stream})"
    return f"if {' and '.join(conditions)}: {text}" if conditions else text


class RegionNames:
    """The names of one region, and its definition. `root`: the wrapper of the whole generated module."""

    def __init__(self, root: Any, region: PlannedRegion) -> None:
        self.root, self.region, self.plan = root, region, region.plan
        notes = WrapperNotes.of(root)
        self.number, notes.regions = notes.regions, notes.regions + 1
        declare_runtime(root)
        self.suffix = f"_{self.number}" if self.number else ""
        self.streams: dict[int, None] = {}  # in use, in order of first use
        self.objects: dict[int, None] = {}  # events of the caller
        self.returned: dict[str, None] = {}  # names that the lines of the region use
        self.recorded: dict[tuple[str, str], None] = {}  # the caller's events that the region records, and where
        self.entry: list[Operation] = []
        self.exit: list[Operation] = []
        self.may_alias: list[int] = []
        self.idle_streams: list[int] = []
        self.is_defined = False
        devices = {*region.devices.values(), *(d for s in self.plan.streams if (d := callers_device(s)) is not None)}
        known = stream_devices()
        devices |= {known[s] for s in self.plan.streams if s in known and callers_device(s) is None}
        # Events of one device take raw handles; what crosses devices goes through torch.Event and stream objects.
        self.device: int | None = devices.pop() if len(devices) == 1 else None
        if self.device is not None:
            self.named(callers_stream_index(self.device))

    def keep_to_one_stream_when_idle(self) -> None:
        """Have calls that find the device idle run on the caller's stream alone: Note [Streams can't pay on an idle
        device] of `streams.single_stream`.
        """
        self.idle_streams = [s for s in self.plan.streams if callers_device(s) is None]
        self.use(self.multi_stream)

    # -- names

    def named(self, stream: int) -> str:
        self.streams[stream] = None
        device = callers_device(stream)
        if is_copy_stream(stream):
            index, is_in = copy_device(stream)
            number = "" if index in (0, CURRENT_DEVICE) else index
            return f"stream_{'in' if is_in else 'out'}{number}{self.suffix}"
        if device is None:
            return f"stream{stream}{self.suffix}"
        return f"stream0{self.suffix}" if stream == 0 else f"stream0_cuda{device}{self.suffix}"

    def use(self, name: str) -> str:
        """Note, and return, a name that `enter` has to return because the region's lines use it."""
        self.returned[name] = None
        return name

    def stream(self, stream: int) -> str:
        return self.use(self.named(stream))

    def raw_stream(self, stream: int) -> str:
        return self.use(f"{self.named(stream)}_raw")

    def handle(self, stream: int) -> str:
        """Return the name that an event of this region takes for a stream: of the raw handle if there is one device,
        else of the stream.
        """
        return self.stream(stream) if self.device is None else self.raw_stream(stream)

    def event(self, index: int) -> str:
        return f"ev{index}{self.suffix}"

    def object(self, index: int) -> str:
        self.objects[index] = None
        return f"event{index}{self.suffix}"

    @property
    def multi_stream(self) -> str:
        return f"multi_stream{self.suffix}"

    def if_multi_stream(self, text: str) -> str:
        """Return a statement that only a call that uses the side streams runs."""
        return f"if {self.multi_stream}: {text}" if self.idle_streams else text

    # -- the definition

    def find_aliases(self) -> list[int]:
        """Return the streams that could turn out to be one in some call: the caller's current stream and the user's
        streams.
        """
        if self.region.enclosed or self.device is None:
            return []
        theirs = [s for s in self.streams if callers_device(s) is None and s not in self.region.private]
        theirs = [s for s in theirs if not is_copy_stream(s)]
        return [callers_stream_index(self.device), *theirs] if theirs else []

    @property
    def is_idle(self) -> bool:
        """True if nothing is looked up, recorded or waited for."""
        return not (self.returned or self.entry or self.exit or self.may_alias)

    def define(self) -> None:
        """Write the region's definition into the module's header. All lines of the region are known by now."""
        self.is_defined = True
        streams: dict[str, int | str] = {}
        for stream in self.streams:
            device = callers_device(stream)
            streams[self.named(stream)] = stream if device is None else f"cuda:{written_index(device)}"
        define_region(
            self.root,
            f"_region{self.number}",
            device=None if self.device is None else written_index(self.device),
            streams=streams,
            events=max(len(self.plan.events), 1 if self.idle_streams else 0),
            entry=tuple(self.entry),
            exit=tuple(self.exit),
            returns=tuple(self.returned),
            objects={self.object(index): index for index in self.objects},
            distinct=tuple(map(self.named, self.may_alias)),
            waits_again=tuple(self.object(w.token.index) for w in self.plan.boundary_waits if self.may_alias),
            records_again=tuple(self.recorded if self.may_alias else ()),
            idle_streams=tuple(self.named(s) for s in self.idle_streams if s not in self.region.private)
            if self.idle_streams
            else None,
        )

    def prologue(self) -> list[str]:
        if self.is_idle:
            return []
        if not self.is_defined:
            self.define()
        names = ", ".join([f"frame{self.number}", *self.returned])
        return [f"{names}, = _region{self.number}.enter()"]

    def epilogue(self) -> list[str]:
        return [] if self.is_idle else [f"frame{self.number}.leave()"]
