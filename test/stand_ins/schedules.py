"""Schedules of FX graphs on GPUs that aren't there: Inductor's scheduler runs, and no kernel is compiled.

    graph = Program()
    x = graph.input(4)
    graph.output(graph.call(aten.relu.default, x, stream=1))
    with graph.scheduled() as scheduler: ...

Inside, `V.graph` is the graph that was lowered.
"""

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._dynamo import graph_bytecode_inputs as numbering
from torch._dynamo.source import ConstantSource
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.scheduler import Scheduler
from torch._inductor.utils import BoxedBool, IndentedBuffer
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, map_arg, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._dynamo import registry
from torch_overlay._functorch.streams.facts import note_fact


PROPERTIES = SimpleNamespace(
    type="cuda",
    major=9,
    minor=0,
    multi_processor_count=100,
    clock_rate=1_000_000,  # kHz
    memory_clock_rate=1_000_000,  # kHz
    memory_bus_width=4096,  # 1.024 TB/s
)


def _device_properties(device: torch.device) -> DeviceProperties:
    return DeviceProperties(
        type=device.type,
        index=device.index or 0,
        multi_processor_count=PROPERTIES.multi_processor_count,
        cc=10 * PROPERTIES.major + PROPERTIES.minor,
        major=PROPERTIES.major,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
    )


@contextlib.contextmanager
def device() -> Iterator[None]:
    """Answer what Inductor asks a GPU while it makes a schedule. The current one has the index 0."""
    answers = (
        mock.patch.object(torch.cuda, "get_device_properties", lambda device=0: PROPERTIES),
        mock.patch.object(DeviceProperties, "create", _device_properties),
        mock.patch.object(torch.accelerator, "current_device_index", lambda: 0),
        mock.patch("torch._inductor.scheduler.has_triton", lambda *args: True),
        mock.patch("torch.utils._triton.triton_hash_with_backend", lambda: "stand-in"),
    )
    with contextlib.ExitStack() as stack:
        for answer in answers:
            stack.enter_context(answer)
        yield


def compiled_graph(**changes: Any) -> CompiledFxGraph:
    """Return what Inductor makes of the graph that is lowered (`V.graph`), without code."""
    arguments: dict[str, Any] = {
        "current_callable": None,
        "graph": V.graph,
        "gm": V.graph.module,
        "output_strides": [],
        "disabled_cudagraphs_reason": None,
        "metrics_deltas": SimpleNamespace(),
        "counter_deltas": {},
        "cudagraphs": BoxedBool(False),
        "example_inputs": (),
        "static_input_idxs": (),
        "compile_region_name": None,
        "fx_kwargs": {},
        "inputs_to_check": (),
        "runnable_graph_str": "",
        "inductor_post_grad_graph_str": "",
    }
    return CompiledFxGraph(**arguments | changes)


def written(lines: Sequence[Any]) -> str:
    """Return the text of lines of a wrapper."""
    code = IndentedBuffer()
    for line in lines:
        if isinstance(line, str):
            code.writeline(line)
        else:
            line.codegen(code)
    return code.getvalue().rstrip()


def spec_of(region: str) -> Any:
    """Return the region of this name as the module that is generated defines it."""
    names: dict[str, Any] = {}
    for part in (V.graph.wrapper_code.imports, V.graph.wrapper_code.header):
        exec(part.getvalue(), names)
    return names[region].spec


class Program:
    """An FX graph of ATen operators with fake values. Nodes are placed on streams by upstream's metadata."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.graph = Graph()
        self.inputs: list[torch.Tensor] = []

    def fake(self, size: Sequence[Any], device: str = "cuda:0", dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with self.mode:
            return torch.empty(size, dtype=dtype, device=device)

    def size(self, hint: int) -> Any:
        """Return a size that code is compiled for without knowing it."""
        environment: Any = self.mode.shape_env
        return environment.create_unspecified_symint_and_symbol(hint, ConstantSource("size"), DimDynamic.DYNAMIC)

    def input(self, *size: Any, device: str = "cuda:0", dtype: torch.dtype = torch.float32) -> Node:
        node = self.graph.placeholder(f"x{len(self.inputs)}")
        node.meta["val"] = self.fake(size, device, dtype)
        self.inputs.append(node.meta["val"])
        return node

    def call(self, target: Any, *args: Any, stream: int = 0, custom: Any = (), **kwargs: Any) -> Node:
        """Add a node, with its value as fake tensors compute it."""
        node = self.graph.call_function(target, args, kwargs)
        values = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values[0], **values[1])
        node.meta["custom"] = {**({"stream": stream} if stream else {}), **dict(custom)}
        return node

    def output(self, *results: Node) -> Node:
        return self.graph.output(results)

    @contextlib.contextmanager
    def scheduled(self, *results: Node, **options: Any) -> Iterator[Scheduler]:
        """Lower the graph and schedule it; `results` are its output, if it has none yet. `options` are those of
        `GraphLowering`."""
        if not self.graph.find_nodes(op="output"):
            self.output(*results)
        module = GraphModule(torch.nn.Module(), self.graph)
        options = {"is_inference": True, **options}
        with device(), V.set_fake_mode(self.mode), V.set_debug_handler(DebugContext()):
            lowered = GraphLowering(module, self.inputs, shape_env=self.mode.shape_env, **options)
            with V.set_graph_handler(lowered):
                lowered.run(*self.inputs)
                lowered.init_wrapper_code()
                lowered.scheduler = Scheduler(lowered.operations)
                yield lowered.scheduler

    def generated(self, **options: Any) -> str:
        """Return the text of the module that is generated for the graph, whose kernels are not compiled."""
        with self.scheduled(**options):
            return V.graph.codegen()[0].value


class NumberedCase(TestCase):
    """Knows no streams of earlier frames."""

    def setUp(self) -> None:
        super().setUp()
        for forget in (numbering.reset_user_object_tracking, registry.reset):
            forget()
            self.addCleanup(forget)


class ProgramCase(NumberedCase):
    """Begins with an empty program. `facts` are noted of each node, but for those that a call names."""

    facts: dict[str, Any] = {}

    def setUp(self) -> None:
        super().setUp()
        self.program = Program()

    def call(self, target: Any, *args: Any, stream: int = 0, **fact: Any) -> Node:
        node = self.program.call(target, *args, stream=stream)
        note_fact(node, **{**self.facts, **fact})
        return node
