"""Counts what CUDA graph relaunch does with the programs of `test/relaunch_programs`, on a device of host memory.

Dynamo and AOTAutograd compile a program, and each of its graphs becomes a region of aten operators, which run on the
host, are captured as nodes, proven, arranged and launched by the overlay's own code. Inductor isn't asked, so a node is
an operator, and not a fused kernel. A row counts the whole program:

    captures, nodes      graphs that were made, and their nodes;  refusals: regions that got no graph
    relaunches           launches of graphs;  pointer slots: in the nodes of all graphs
    outputs, scratch     bytes of the plans: what a launch of each graph allocates;  allocations: in how many blocks.
                         Scratch is packed, however small it is

Programs that ask for a GPU, for several processes, for threads, for the garbage collector or for a process of their own
aren't counted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any, TYPE_CHECKING
from unittest import mock


if TYPE_CHECKING:
    import records  # pyrefly: ignore[missing-import]


ARENA = 1 << 28  # bytes of addresses for a capture


def names() -> list[str]:
    from relaunch_programs import PROGRAMS

    left_out = (p.gpu_only or p.ranks > 1 or p.random or p.alone or _is_unsteady(p) for p in PROGRAMS)
    return [p.name for p, out in zip(PROGRAMS, left_out) if not out]


def _is_unsteady(program: Any) -> bool:
    """True if threads or the garbage collector decide what it does, and when."""
    return any(word in inspect.getsource(program.body) for word in ("thread", "gc."))


def figures(name: str) -> records.Figures:
    """Run a program of the corpus once."""
    import torch
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.utils import counters

    from relaunch_programs import by_name, Kit
    from stand_ins import relaunch_device  # pyrefly: ignore[missing-import]
    from stand_ins.relaunch_host import Choosing  # pyrefly: ignore[missing-import]
    from torch_overlay._inductor.relaunch import runners
    from torch_overlay._inductor.relaunch.causes import CodeFacts
    from torch_overlay._inductor.relaunch.memory import arrange
    from torch_overlay._inductor.relaunch.runner import Runner

    torch._dynamo.reset()
    torch.manual_seed(0)
    counters.clear()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(relaunch_device, "ARENA", ARENA))
        stack.enter_context(mock.patch.object(arrange, "SMALL", 0))
        device: Any = stack.enter_context(relaunch_device.fake_device())

        def compiled(module: Any, inputs: Any, is_backward: bool = False) -> Any:
            def region(args: list[Any]) -> tuple[Any, ...]:
                given = list(args)
                args.clear()
                chooses = any(node.target is torch.ops.higher_order.cond for node in module.graph.nodes)
                return tuple(Choosing(module).run(*given) if chooses else module(*given))

            run = Runner(region, CodeFacts(name, 0, is_backward=is_backward), device)
            call = lambda args: run(args)  # noqa: E731
            call._boxed_call = True  # type: ignore[attr-defined]
            return call

        backward = functools.partial(compiled, is_backward=True)
        backend = aot_autograd(fw_compiler=compiled, bw_compiler=backward)
        stack.enter_context(mock.patch.object(Kit, "_how", lambda kit: {"backend": backend}))
        by_name(name).body(Kit("relaunched", "cpu"))
        runners.forget_all()
    torch._dynamo.reset()
    found = counters["torch_overlay"]
    counted = {key: found[f"cudagraph_{key}"] for key in ("captures", "nodes", "refusals", "relaunches")}
    layouts = [layout for a in device.arrangements for layout in ([s.layout for s in a.stages] or [a.layout])]
    counted["pointer slots"] = sum(executable.slots for executable in device.executables)
    counted["outputs"] = sum(s.size for layout in layouts for s in layout.storages)
    counted["scratch"] = sum(layout.scratch_size for layout in layouts)
    counted["allocations"] = sum(len(layout.storages) + bool(layout.scratch_size) for layout in layouts)
    return {"exact": {key: [value] for key, value in counted.items()}}
