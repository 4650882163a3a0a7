"""Define the lines of Inductor's wrapper that a planned region adds."""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

from torch._inductor.codegen import wrapper as upstream

from torch_overlay._inductor.notes import WrapperNotes


if TYPE_CHECKING:
    from torch._inductor.utils import IndentedBuffer

    from torch_overlay._inductor.streams.region_names import RegionNames


@dataclasses.dataclass
class StreamLine(upstream.WrapperLine):
    """A statement on streams and events, which doesn't read the current stream."""

    text: str

    def codegen(self, code: IndentedBuffer) -> None:
        code.writeline(self.text)


class SwitchLine(StreamLine):
    """A switch of the current stream."""


@dataclasses.dataclass
class BeginRegion(upstream.WrapperLine):
    emitter: RegionNames

    def codegen(self, code: IndentedBuffer) -> None:
        self.emitter.write_prologue(code)


@dataclasses.dataclass
class EndRegion(upstream.WrapperLine):
    emitter: RegionNames

    def codegen(self, code: IndentedBuffer) -> None:
        self.emitter.write_epilogue(code)


@dataclasses.dataclass
class OnStream(upstream.WrapperLine):
    """A mark: the lines that follow belong to a node of this stream; None: to one that launches nothing on a device.
    `range` is the name of the work there in profiles, if it has one."""

    emitter: RegionNames
    stream: int | None
    device_index: int | None
    range: str = ""

    def codegen(self, code: IndentedBuffer) -> None:
        pass


@dataclasses.dataclass
class TryLine(upstream.WrapperLine):
    def codegen(self, code: IndentedBuffer) -> None:
        code.writeline("try:")
        code.do_indent()


@dataclasses.dataclass
class FinallyLine(upstream.WrapperLine):
    statements: list[str]

    def codegen(self, code: IndentedBuffer) -> None:
        code.do_unindent()
        code.writeline("finally:")
        code.do_indent()
        code.writelines(self.statements)
        code.do_unindent()


@dataclasses.dataclass
class PlacedKernelCall(upstream.WrapperLine):
    """A kernel launch with the raw handle of its stream."""

    line: upstream.KernelCallLine
    raw_stream: str

    def codegen(self, code: IndentedBuffer) -> None:
        notes = WrapperNotes.of(self.line.wrapper)
        notes.raw_stream = self.raw_stream
        try:
            self.line.codegen(code)
        finally:
            notes.raw_stream = None


def has_streams(wrapper: Any) -> bool:
    """True if a planned region is in the lines of a wrapper."""
    return any(isinstance(line, BeginRegion) for line in wrapper.lines)
