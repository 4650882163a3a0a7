"""Write the statements of a generated module that define its regions, and those that name what the runtime has."""

from __future__ import annotations

import pprint
import textwrap
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch._inductor.virtualized import V


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
