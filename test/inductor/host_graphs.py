"""Graphs for what Inductor compiles for the host, on the device of `relaunch_device`.

    with host_graphs():
        torch.compile(fn)(x)

Everything on the way is real, from the program to the runner of a region: Inductor takes the host's tensors and kernels
for a device's, and calls each operator of PyTorch as it is, so that no C++ is compiled and results are eager's.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._inductor import cudagraph_utils, scheduler
from torch._inductor.output_code import CompiledFxGraph

import form  # noqa: F401
from stand_ins.relaunch_device import fake_device, FakeDevice
from torch_overlay._inductor.relaunch import runner
from torch_overlay.hooks import put_in_place


def options() -> dict[str, Any]:
    return {"fallback_by_default": True, "triton.cudagraphs": True}


@contextlib.contextmanager
def host_graphs() -> Iterator[FakeDevice]:
    put_in_place()
    post_compile = CompiledFxGraph.post_compile

    def on_device(graph: Any, *args: Any) -> None:
        graph.device_idxs = [0]
        post_compile(graph, *args)

    with fake_device() as device, contextlib.ExitStack() as stack:
        for patch in (
            mock.patch.object(scheduler.BaseSchedulerNode, "is_gpu", lambda node: True),
            mock.patch.object(cudagraph_utils, "check_multiple_devices_or_any_cpu_nodes", lambda nodes: None),
            mock.patch.object(CompiledFxGraph, "post_compile", on_device),
            mock.patch.object(runner, "Runner", functools.partial(runner.Runner, device=device)),
            inductor_config.patch(options()),
        ):
            stack.enter_context(patch)
        yield device


def counted() -> tuple[int, int]:
    """How many graphs were captured, and how often graphs were launched."""
    return tuple(counters["torch_overlay"]["cudagraph_" + name] for name in ("captures", "relaunches"))  # type: ignore
