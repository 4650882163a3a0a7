"""Define the lines of Inductor's wrapper that a planned region adds, and write the module's statements around them."""

from __future__ import annotations

import dataclasses
import pprint
import textwrap
from typing import Any, TYPE_CHECKING

import torch._inductor.config as inductor_config
from torch._inductor.codegen import wrapper as upstream


if TYPE_CHECKING:
    from torch._inductor.utils import IndentedBuffer

    from torch_overlay._inductor.streams.emitter import RegionEmitter


RUNTIME = "from torch_overlay._inductor.streams.runtime import region, restore_stream, set_stream"


@dataclasses.dataclass
class StreamLine(upstream.WrapperLine):
    """A statement on streams and events, which doesn't read the current stream."""

    text: str

    def codegen(self, code: IndentedBuffer) -> None:
        code.writeline(self.text)


@dataclasses.dataclass
class BeginRegion(upstream.WrapperLine):
    emitter: RegionEmitter

    def codegen(self, code: IndentedBuffer) -> None:
        for line in self.emitter.prologue():
            code.writeline(line)


@dataclasses.dataclass
class EndRegion(upstream.WrapperLine):
    emitter: RegionEmitter

    def codegen(self, code: IndentedBuffer) -> None:
        for line in self.emitter.epilogue():
            code.writeline(line)


@dataclasses.dataclass
class OnStream(upstream.WrapperLine):
    """A mark: the lines that follow belong to a node of this stream; None: to a node of the host. `range` is the name
    of the work there in profiles, if it has one."""

    emitter: RegionEmitter
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
        for statement in self.statements:
            code.writeline(statement)
        code.do_unindent()


@dataclasses.dataclass
class PlacedKernelCall(upstream.WrapperLine):
    """A kernel launch with the raw handle of its stream."""

    line: upstream.KernelCallLine
    raw_stream: str

    def codegen(self, code: IndentedBuffer) -> None:
        wrapper: Any = self.line.wrapper
        wrapper._overlay_raw_stream = self.raw_stream
        try:
            self.line.codegen(code)
        finally:
            wrapper._overlay_raw_stream = None


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
    allocator.
    """
    text = f"{name}.record_stream({stream})"
    captures = inductor_config.triton.cudagraphs
    return f"if not torch.cuda.is_current_stream_capturing(): {text}" if captures else text
