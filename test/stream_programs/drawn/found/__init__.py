"""Programs that random ones have shrunk to, one a file, each named after what went wrong when it was compiled."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

from stream_programs.drawn.writer import host_waits, Written


def _read(name: str) -> Written:
    module = importlib.import_module(f"{__name__}.{name}")
    text = inspect.getsource(module.build)
    waits, blocks = host_waits(text)
    return Written(
        text,
        tuple(module.INPUTS.split()),
        train="trains(" in text,
        random="dropout" in text or "rand" in text,
        unjoined="# unjoined" in text,
        host="cpu" in text or "pin_memory" in text or "out" in module.INPUTS.split(),
        fullgraph="graph_break" not in text and ".item()" not in text,
        host_waits=waits,
        host_blocks=blocks,
        misaligned="loads=" in text,
        loads="loads=" in text,
    )


PROGRAMS = {name: _read(name) for _, name, _ in pkgutil.iter_modules(__path__)}
