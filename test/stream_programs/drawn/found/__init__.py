"""Programs that random ones have shrunk to, each named after what went wrong when it was compiled."""

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

from stream_programs.drawn.writer import host_waits, Written


PROGRAMS: dict[str, Written] = {}
MADE = {"e": "torch.cuda.Event()", "buffer": "k.parameter(32, 32)", "s": "k.stream()", "sleep": "k.sleep"}


def as_written(forward: Callable[..., object], train: str, loads: str) -> str:
    """The build function of a program, as `writer` writes it: `current` is the stream at its beginning."""
    source = inspect.getsource(forward)
    head, body = re.split(r"\):\n", source[re.search(r"^def ", source, re.MULTILINE).start() :], maxsplit=1)
    parameters = inspect.signature(forward).parameters.values()
    if next(iter(parameters)).name == "k":
        return re.sub(r"\w+\(", "build(", head, count=1) + "):\n" + body
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    makers = {**MADE, "w": f"weight(k, {bool(train)})"}
    made = "".join(f"    {name} = {makers[name.rstrip('0123456789')]}\n" for name in names)
    inputs = ", ".join(p.name for p in parameters if p.name not in names)
    weights = f"{train}, [{', '.join(name for name in names if name[0] == 'w')}], " if train else ""
    if re.search(r"\bcurrent\b", body) and "    current = " not in body:
        body = f"    current = torch.cuda.current_stream()\n{body}"
    call = f"{'trains' if train else 'calls'}(k, fn, {weights}{'[buffer]' if 'buffer' in names else '[]'}"
    call += f", loads=({names[0]}, {loads}))" if loads else ")"
    return f"def build(k):\n{made}\n    def fn({inputs}):\n{textwrap.indent(body, '    ')}\n    return {call}\n"


def found(forward: Any = None, *, train: str = "", loads: str = "", misaligned: bool = False) -> Any:
    """Keeps a program as text, as `writer` writes it. Parameters ahead of the `/` are made outside of the program.

    `train`: the position of the input that has a gradient, or None. `loads`: the caller fills the inputs at these
    positions on the first stream. `misaligned`: it passes inputs that no vector load may read. A function of `k` is a
    build function already.
    """
    if forward is None:
        return lambda forward: found(forward, train=train, loads=loads, misaligned=misaligned)
    text = as_written(forward, train, loads)
    inputs = tuple(re.findall(r"\w+", re.search(r"def fn\((.*)\)", text)[1]))
    told, blocks = host_waits(text)
    PROGRAMS[forward.__name__] = Written(
        text,
        inputs,
        train="trains(" in text,
        random="dropout" in text or "rand" in text,
        unjoined="# unjoined" in text,
        host="cpu" in text or "pin_memory" in text or "out" in inputs,
        fullgraph="graph_break" not in text and ".item()" not in text,
        host_waits=told,
        host_blocks=blocks,
        misaligned=misaligned or "loads=" in text,
        loads="loads=" in text,
    )


from stream_programs.drawn.found import frames, host, one_frame, parts, training, waits  # noqa: E402, F401


PROGRAMS = dict(sorted(PROGRAMS.items()))
