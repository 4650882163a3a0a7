"""Programs that random ones have shrunk to, each named after what went wrong when it was compiled."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

from stream_programs.drawn.writer import host_waits, Written


if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAMS: dict[str, Written] = {}


def found(inputs: str) -> Callable[[Callable[..., object]], None]:
    """Keeps a build function as text, as `writer` writes it."""

    def keep(build: Callable[..., object]) -> None:
        text = re.sub(r".*?^def \w+", "def build", inspect.getsource(build), count=1, flags=re.DOTALL | re.MULTILINE)
        told, blocks = host_waits(text)
        PROGRAMS[build.__name__] = Written(
            text,
            tuple(inputs.split()),
            train="trains(" in text,
            random="dropout" in text or "rand" in text,
            unjoined="# unjoined" in text,
            host="cpu" in text or "pin_memory" in text or "out" in inputs.split(),
            fullgraph="graph_break" not in text and ".item()" not in text,
            host_waits=told,
            host_blocks=blocks,
            misaligned="loads=" in text,
            loads="loads=" in text,
        )

    return keep


from stream_programs.drawn.found import frames, host, one_frame, parts, training, waits  # noqa: E402, F401


PROGRAMS = dict(sorted(PROGRAMS.items()))
