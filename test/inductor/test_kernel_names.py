"""Kernels of a graph are named by the user's lines in torch's annotations, where the driver tells their ids."""

import gc
import importlib
import itertools
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from host_graphs import host_graphs
from profiler_traces import traced
from torch._inductor.test_case import TestCase
from torch.cuda.graph_annotations import get_kernel_annotations

import form
from stand_ins import relaunch_device
from stand_ins.relaunch_case import GpuTestCase
from torch_overlay import config
from torch_overlay._inductor.kernel_places import MARK, place_at
from torch_overlay._inductor.relaunch.capture import kernel_names
from torch_overlay._inductor.relaunch.capture.device import Cuda
from torch_overlay._inductor.relaunch.capture.kernel_names import annotate, KernelLines
from torch_overlay.csrc import DriverError
from torch_overlay.testing import compile_only, simulated_gpu


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).sum(0)


LINE = f"test_kernel_names.py:{Model.forward.__code__.co_firstlineno + 1}"


class TestLines(TestCase):
    def run_module(self, source: str) -> dict[int, int]:
        """Lines of a module's text by the number of the node, where `launch()` makes a node."""
        nodes: list[int] = []
        scope: dict[str, Any] = {"launch": lambda: nodes.append(len(nodes))}
        exec(compile(source, "generated", "exec"), scope)
        lines = KernelLines(scope, lambda: nodes)
        before = sys.gettrace()
        with lines:
            scope["region"]()
        self.assertIs(sys.gettrace(), before)
        return {node: line for node, (_, line) in lines.made.items()}

    def test_node_has_the_line_that_launched_it(self) -> None:
        source = (
            "def region():\n    launch()\n    x = 1\n    launch(), launch()\n    inner()\ndef inner():\n    launch()\n"
        )
        self.assertEqual(self.run_module(source), {0: 2, 1: 4, 2: 4, 3: 7})

    def test_tracing_ends_when_the_region_raises(self) -> None:
        before = sys.gettrace()
        with self.assertRaises(ZeroDivisionError), KernelLines({}, list):
            1 / 0  # noqa: B018
        self.assertIs(sys.gettrace(), before)

    def test_broken_capture_is_for_the_region_to_report(self) -> None:
        scope: dict[str, Any] = {}
        exec("def region():\n x = 1\n return 1 / 0", scope)
        with (
            self.assertRaises(ZeroDivisionError),
            KernelLines(scope, mock.Mock(side_effect=DriverError("f", 901, "broken"))),
        ):
            scope["region"]()

    def test_lines_are_those_of_the_program(self) -> None:
        """A program that Inductor compiles for the host, captured on the stand-in."""
        torch._dynamo.reset()
        noted = []

        def noting_lines(recording: Any, namespace: Any) -> KernelLines:
            noted.append(KernelLines(namespace, recording.nodes))
            return noted[-1]

        model, x = Model(), torch.randn(4, 16)
        self.enterContext(mock.patch.object(relaunch_device.Recording, "noting_lines", noting_lines))
        with host_graphs(), torch.no_grad(), config.patch(nvtx=True):
            compiled = torch.compile(model)
            for _ in range(2):
                self.assertEqual(compiled(x), model(x))
        places = [place for place, _ in itertools.groupby(noted[0].places().values())]
        self.assertEqual(places, [f"{LINE}, layers.0", f"{LINE}, layers.1", LINE])


class TestPlaces(TestCase):
    def comments(self, nvtx: bool, fn: Any, *args: Any) -> list[list[str]]:
        """Of the forward, and of the backward."""
        torch._dynamo.reset()
        with config.patch(nvtx=nvtx):
            texts = compile_only(fn, *args, mode="reduce-overhead", backward=True).wrappers
        return [[line.strip() for line in text.splitlines() if MARK in line] for text in texts]

    def test_line_and_module_of_each_kernel(self) -> None:
        """In a backward, too: those of the forward."""
        with simulated_gpu():
            model, x = Model().to("cuda"), torch.randn(8, 16, device="cuda")
            forward, backward = self.comments(True, model, x)
            plain = self.comments(False, model, x)
        self.assertEqual(forward, [f"{MARK}{LINE}, layers.0", f"{MARK}{LINE}"])
        self.assertEqual(set(backward), {f"{MARK}{LINE}, layers.0"})
        self.assertEqual(plain, [[], []])

    def test_module_outside_of_the_program_has_its_name(self) -> None:
        with simulated_gpu():
            model, x = Model().to("cuda"), torch.randn(8, 16, device="cuda")
            scope: dict[str, Any] = {"model": model}
            exec("def fn(x):\n    return model(x)", scope)
            forward, _ = self.comments(True, scope["fn"], x)
        self.assertEqual(forward, [f"{MARK}{LINE}, model.layers.0", f"{MARK}{LINE}, model"])

    def test_place_is_that_of_the_function(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "generated.py"))
            Path(path).write_text(f"def a():\n    {MARK}a.py:1, block\n    run()\ndef b():\n    run()\n")
            self.assertEqual([place_at(path, line) for line in (3, 5)], ["a.py:1, block", ""])


class Graph:
    """Stands for an executable graph."""

    def raw_cuda_graph_exec(self) -> int:
        return 7


def executable(*handles: int) -> Any:
    nodes = [SimpleNamespace(handle=handle) for handle in handles]
    return SimpleNamespace(graph=Graph(), template=SimpleNamespace(nodes=nodes))


class TestAnnotations(TestCase):
    def setUp(self) -> None:
        super().setUp()
        runtime = importlib.import_module("cuda.bindings.runtime")
        self.status = runtime.cudaError_t.cudaSuccess
        self.refused = runtime.cudaError_t.cudaErrorCallRequiresNewerDriver
        for name, function in (
            ("cudaGraphExecGetId", lambda graph: (self.status, graph + 100)),
            ("cudaGraphNodeGetToolsId", lambda node: (self.status, 5 << 32 | node + 1000)),
        ):
            self.enterContext(mock.patch.object(runtime, name, function))

    def test_keys_are_the_executables_while_it_lives(self) -> None:
        made = executable(31, 32, 33)
        annotate({1: "a.py:1", 3: "a.py:3"}, [1, 2, 3], made)
        expected = {107 << 32 | 1031: [{"name": "a.py:1"}], 107 << 32 | 1033: [{"name": "a.py:3"}]}
        self.assertEqual(dict(get_kernel_annotations()), expected)
        del made
        gc.collect()
        self.assertEqual(dict(get_kernel_annotations()), {})

    def test_each_stage_has_its_lines(self) -> None:
        """The handles of a stage are those of a clone."""
        lines = SimpleNamespace(places=lambda: {1: "a.py:1", 2: "a.py:2"})
        captured = SimpleNamespace(recording=SimpleNamespace(lines=lines))
        templates = [SimpleNamespace(nodes=[SimpleNamespace(handle=k)]) for k in (2, 1)]
        made = [executable(52), executable(51)]
        with mock.patch.object(Graph, "raw_cuda_graph_exec", lambda graph: 8 if graph is made[0].graph else 9):
            Cuda._annotate(SimpleNamespace(), captured, templates, made)  # type: ignore[arg-type]
        expected = {108 << 32 | 1052: [{"name": "a.py:2"}], 109 << 32 | 1051: [{"name": "a.py:1"}]}
        self.assertEqual(dict(get_kernel_annotations()), expected)

    def test_driver_that_refuses_takes_no_graph_away(self) -> None:
        self.status = self.refused
        with self.assertLogs(kernel_names.log, "INFO") as logs:
            annotate({1: "a.py:1"}, [1], executable(31))
        self.assertIn("a graph is not annotated", logs.output[0])
        self.assertEqual(dict(get_kernel_annotations()), {})

    def test_nothing_is_asked_without_the_option(self) -> None:
        for value in (None, False):
            with config.patch(nvtx=value), mock.patch.object(kernel_names, "are_available") as asked:
                self.assertFalse(Cuda(0).annotates)
                asked.assert_not_called()


@form.needs_gpu
class TestOnAGpu(GpuTestCase):
    def test_kernels_have_their_lines_in_a_trace(self) -> None:
        if not kernel_names.are_available():
            self.skipTest("needs a driver of CUDA 13.1, which tells the ids of nodes")
        model, x = Model().to("cuda"), torch.randn(8, 16, device="cuda")
        with torch.no_grad(), config.patch(nvtx=True):
            compiled = torch.compile(model, mode="reduce-overhead")
            for _ in range(3):
                compiled(x)
            with torch.profiler.profile() as profiler:
                compiled(x)
                torch.cuda.synchronize()
        events = traced(profiler, cuda_graph_annotations=get_kernel_annotations())
        names = {e["args"].get("name") for e in events if e.get("cat") == "kernel"}
        self.assertLessEqual({f"{LINE}, layers.0", LINE}, names)
        self.assertNotIn(None, names)
