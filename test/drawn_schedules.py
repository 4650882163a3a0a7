"""Random graphs with streams, and the code that Inductor generates for them on GPUs that aren't there.

    python test/drawn_schedules.py 40 FILE

Streams and tokens are noted on the nodes as passes before Inductor do it. The form of pull requests runs the same
program with their names of modules (`test/tools/test_upstream_stack.py`), so that both texts can be compared.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch
import torch._inductor.config as inductor_config
from torch._dynamo import graph_bytecode_inputs as numbering

from schedule_stand_in import Program
from torch_overlay import config
from torch_overlay._dynamo import registry
from torch_overlay._functorch.streams.facts import note_fact
from torch_overlay._functorch.streams.tokens import CALLER, caller_event, record


if TYPE_CHECKING:
    from torch.fx import Node

aten, prims, streams = torch.ops.aten, torch.ops.prims, torch.ops.streams
KINDS = ("product", "product", "sine", "sum", "parts", "update", "download", "record", "record_stream")
SIDE = 64  # of a matrix


class Drawn:
    """One graph of up to 12 operations on the caller's stream and on up to three others."""

    def __init__(self, seed: int) -> None:
        numbering.reset_user_object_tracking()
        registry.reset()
        self.draw = random.Random(seed)
        self.program = Program()
        self.inputs = [self.program.input(SIDE, SIDE) for _ in range(3)]
        self.values, self.on_host = list(self.inputs), []
        self.records = 0
        count = self.draw.randint(1, 3)
        for _ in range(self.draw.randint(3, 12)):
            self.add(self.draw.choice(KINDS), self.draw.choice([0, 0, *range(1, count + 1)]))

    def call(self, target: Any, *args: Any, stream: int = 0, after: tuple[Any, ...] = (), **fact: Any) -> Node:
        node = self.program.call(target, *args, stream=stream)
        joined = (CALLER,) if stream else ()
        note_fact(node, after=tuple(sorted({*after, *joined})), before=joined, **fact)
        return node

    def value(self) -> Node:
        return self.draw.choice(self.values)

    def add(self, kind: str, stream: int) -> None:
        where: dict[str, Any] = {"stream": stream, "after": (caller_event(5),) if self.draw.random() < 0.05 else ()}
        if kind == "product":
            self.values.append(self.call(aten.mm.default, self.value(), self.value(), **where))
        elif kind == "sine":
            self.values.append(self.call(aten.sin.default, self.value(), **where))
        elif kind == "sum":
            self.values.append(self.call(aten.add.Tensor, self.value(), self.value(), **where))
        elif kind == "parts":
            whole = self.call(aten.cat.default, [self.value(), self.value()], **where)
            self.values.append(self.call(aten.slice.Tensor, whole, 0, SIDE // 2, SIDE + SIDE // 2, **where))
        elif kind == "update":
            self.call(aten.copy_.default, self.draw.choice(self.inputs), self.value(), **where)
        elif kind == "download":
            copy = self.call(prims.device_put.default, self.value(), torch.device("cpu"), self.draw.random() < 0.7)
            self.on_host.append(self.call(aten.sin.default, copy))
        elif kind == "record":
            tokens = {"requires": record(5, self.records), "order": self.records}
            self.call(streams.record_event.default, 5, stream, **tokens, **where)
            self.records += 1
        else:
            self.call(streams.record_stream.default, self.value(), max(stream, 1), **where)

    def generated(self) -> str:
        """Return the module's text, for drawn options."""
        made = self.values[len(self.inputs) :] or [self.call(aten.sin.default, self.inputs[0])]
        results = self.draw.sample(made, self.draw.randint(1, min(len(made), 3)))
        if self.draw.random() < 0.5:
            joined = made[0]
            for other in made[1:]:
                joined = self.call(aten.mm.default, joined, other)
            results = [joined]
        self.program.output(*results, *self.on_host)
        changes = {
            "triton.cudagraphs": self.draw.random() < 0.4,
            "graph_partition": True,
            "memory_planning": self.draw.random() < 0.2,
        }
        scheduled: dict[str, Any] = {}
        if self.draw.random() < 0.3:
            scheduled |= {"is_backward": True, "is_inference": False}
        if self.draw.random() < 0.4:
            scheduled["inputs_to_check"] = range(len(self.inputs))
        config.streams = True
        config.nvtx = self.draw.random() < 0.3
        config.fold_branches_below_us = self.draw.choice([0.0, 5.0, 1000.0])
        with inductor_config.patch(changes):
            return self.program.generated(**scheduled)


if __name__ == "__main__":
    texts = [Drawn(seed).generated() for seed in range(int(sys.argv[1]))]
    Path(sys.argv[2]).write_text("\f".join(texts))
