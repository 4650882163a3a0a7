"""Lets torch.compile take the host for a GPU, so that what it compiles is captured and relaunched for real, by the
stand-in device of `relaunch_device`.

Dynamo, AOTAutograd and Inductor run in full, up to the generated module: in its place the FX graph that it was
generated from is run, an operator at a time.
"""

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor.codecache import PyCodeCache

from stand_ins.relaunch_device import FakeDevice
from torch_overlay._inductor.relaunch import conditions, policy, runner
from torch_overlay._inductor.relaunch.capture.branches import choose


WHOLE = """
def call(args):
    inputs = list(args)
    args.clear()
    return run(inputs)
"""


class Choosing(torch.fx.Interpreter):
    """Runs conditions as generated code for graphs does."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not torch.ops.higher_order.cond:
            return super().call_function(target, args, kwargs)
        predicate, true, false, operands = args
        return choose([predicate, *operands], branch_of(false), branch_of(true))


@functools.cache
def branch_of(module: torch.fx.GraphModule) -> Any:
    def branch(operands: list[Any]) -> tuple[Any, ...]:
        given = list(operands)
        operands.clear()
        return tuple(Choosing(module).run(*given))

    branch.__name__ = f"branch_{id(module)}"
    return branch


modules: dict[str, Any] = {}  # by the cache's key of generated code


def module_of(graph: Any, device: FakeDevice) -> Any:
    """Stands for `GraphLowering.compile_to_module`."""
    code, _ = graph.codegen()
    graph.cache_key, graph.cache_path = PyCodeCache.write(code.value)
    graph.device_idxs.add(device.index)
    fx_module = graph.module

    def run(inputs: list[Any]) -> tuple[Any, ...]:
        with torch.no_grad():  # an interpreter holds the values of its run, and threads may run the same code
            return tuple(Choosing(fx_module).run(*inputs))

    module = modules[graph.cache_key] = generated(WHOLE, device, run=run)
    return module


def generated(text: str, device: FakeDevice, **scope: Any) -> Any:
    """A module like those that Inductor generates, with a function `call`, and a `runner` if it is partitioned."""
    scope = {"torch": torch, "empty_strided_cuda": device.empty, **scope}
    exec(text, scope)
    named = {name: scope[name] for name in ("call", "runner", "recursively_apply_fns") if name in scope}
    return SimpleNamespace(**named, __file__=__file__)


def load(graph: Any, constants: Any) -> str:
    """Stands for `CompiledFxGraph.after_deserialization`."""
    graph.current_callable = modules[graph.cache_key].call
    return __file__


@contextlib.contextmanager
def host_as_gpu(device: FakeDevice) -> Iterator[list[Any]]:
    """Yield the runners that are made."""
    real, made = runner.Runner, []

    def keep(model: Any, code: Any) -> Any:
        made.append(real(model, code, device))
        return made[-1]

    with (
        inductor_config.patch(graph_partition=False, fx_graph_cache=False, compile_threads=1),
        torch._functorch.config.patch(enable_autograd_cache=False),
        mock.patch("torch._inductor.graph.GraphLowering.compile_to_module", lambda graph: module_of(graph, device)),
        mock.patch("torch._inductor.output_code.CompiledFxGraph.after_deserialization", load),
        mock.patch("torch._inductor.cudagraph_utils.check_lowering_disable_cudagraph", lambda mapping: None),
        mock.patch.object(policy, "_launches", lambda compiled: not compiled.kernel_free_cudagraph),
        mock.patch.object(runner, "Runner", keep),
        mock.patch.object(conditions, "DEVICES", ("cpu",)),
    ):
        yield made
