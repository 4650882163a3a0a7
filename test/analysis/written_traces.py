"""Traces in a notation of one line: operations in host order, with `;` between them.

main allocates x                memory of a stream; `main allocates x of graph`: of its private pool
main makes x                    the same, and a kernel that writes it
side copies x y[0:32] > z       a kernel of this name: what it reads, and what it writes
main -> side                    an event that `main` records, and `side` waits for
record e main; wait e side      the same in two
synchronize; synchronize main; synchronize event e
free x; record_stream x side
"""

import re

import form  # noqa: F401
from torch_overlay.analysis.race_check.trace import Memory, Trace, View


class Written(Trace):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.memory: dict[str, Memory] = {}
        self.then(text)

    def then(self, text: str) -> "Written":
        for step in text.split("; "):
            self._do(*step.split())
        return self

    def _do(self, *words: str) -> None:
        match words:
            case [stream, "allocates" | "makes" as what, name, *pool]:
                memory = self.memory[name] = self.alloc(name, 64, on=stream, pool=" ".join(pool[1:]))
                if what == "makes":
                    self.launch(what, stream, writes=[memory])
            case [stream, "->", other]:
                self.record(event := " ".join(words), stream)
                self.wait(event, other)
            case ["record", event, stream]:
                self.record(event, stream)
            case ["wait", event, stream]:
                self.wait(event, stream)
            case ["synchronize", "event", event]:
                self.synchronize(event=event)
            case ["synchronize", *stream]:
                self.synchronize(stream=" ".join(stream) or None)
            case ["free", name]:
                self.free(self.memory[name])
            case ["record_stream", name, stream]:
                self.record_stream(self.memory[name], stream)
            case [stream, name, *used]:
                reads, _, writes = " ".join(used).partition(">")
                self.launch(name, stream, self._views(reads), self._views(writes))

    def _views(self, text: str) -> list[Memory | View]:
        parts = re.findall(r"(\w+)(?:\[(\d+):(\d+)\])?", text)
        return [self.memory[name][int(start) : int(end)] if end else self.memory[name] for name, start, end in parts]


__all__ = ["Written"]
