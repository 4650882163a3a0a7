# Owner(s): ["module: inductor"]

import dataclasses
import gc
import tempfile
import unittest
from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch import launcher, memcpy_nodes, native
from torch._inductor.cudagraph_relaunch.launcher import ByNode, Launcher
from torch._inductor.cudagraph_relaunch.nodes import (
    CopyNode,
    EmptyNode,
    KernelNode,
    PointerSlot,
    Template,
)
from torch._inductor.cudagraph_relaunch.subgraph import Part
from torch.testing._internal import cuda_driver_stand_in
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.cuda_node_stand_in import DRIVER, noted
from torch.utils._triton import has_triton_package


EXECUTABLE, STREAM = 0xE0, 0x57
LAUNCHES = """
typedef struct { unsigned shape[8]; uint64_t stream; } Config;
int cuStreamIsCapturing(uint64_t stream, int *status) { return *status = 0; }
int cuGraphLaunch(uint64_t exec, uint64_t stream) { return note(3, exec, 0, 0, stream); }
int cuLaunchKernelEx(const Config *config, uint64_t function, uint64_t **arguments,
                     void **extra) {
  return note(4, function, arguments[0][0], 0, config->stream);
}
"""


class Exec:
    """Blocks of an executable, which note what they are made of."""

    def __init__(self, *args):
        self.args, self.patched = args, []

    def patch(self, bases, regions=None):
        self.patched.append((bases, regions))
        return 1


class Graph:
    """A torch.cuda.CUDAGraph, whose methods in Python are not to be called."""

    launched = 0

    def raw_cuda_graph_exec(self):
        return EXECUTABLE

    def replay(self):
        raise AssertionError("that looks for hooks first")


class Base:
    """The base class of CUDAGraph."""

    def replay(self):
        self.launched += 1


def template(nodes):
    return Template(1, tuple(nodes), (PointerSlot(0, 0, 0, 0, 0),))


def kernel(index, handle, name="add"):
    shape = (1, 1, 1), (32, 1, 1), 0
    parameters = ((0, bytes(8)),)
    return KernelNode(index, handle, name, 7, 0, 0, *shape, parameters)


class TestLauncher(TestCase):
    def setUp(self):
        super().setUp()
        module = mock.Mock(Exec=Exec)
        self.enterContext(mock.patch.object(native, "implementation", lambda: module))
        base = mock.patch.object(torch._C, "_CUDAGraph", Base, create=True)
        self.enterContext(base)

    def test_parts_of_the_template(self):
        given, shared = template([kernel(0, 10)]), object()
        made = Launcher(Graph(), given, True, shared)
        wanted = given.nodes, given.slots, given.regions, given.numbers, shared
        self.assertEqual(made.exec.args, (EXECUTABLE, *wanted))
        self.assertEqual((made.nodes, made.direct, made.patcher), (1, True, None))
        made.patch([5], [0])
        self.assertEqual(made.exec.patched, [([5], [0])])

    def test_launch_without_hooks(self):
        graph = Graph()
        made = Launcher(graph, template([kernel(0, 10)]))
        made.replay()
        self.assertEqual((graph.launched, made.direct), (1, False))

    def test_part_launches_itself(self):
        part = mock.Mock(spec=Part)
        part.raw_cuda_graph_exec.return_value = EXECUTABLE
        Launcher(part, template([kernel(0, 10)])).replay()
        part.replay.assert_called_once_with()

    def test_same_executable_with_another_template(self):
        shared = object()
        first = Launcher(
            Graph(), template([kernel(0, 10), kernel(1, 11)]), True, shared
        )
        second = first.like(template([kernel(0, 20, "mul"), kernel(1, 21)]))
        self.assertIs(second.graph, first.graph)
        nodes = [(node.handle, node.name) for node in second.template.nodes]
        self.assertEqual(nodes, [(10, "mul"), (11, "add")])
        first.forget()
        self.assertEqual((first.template.nodes, first.template.slots), ((), ()))
        second = first.like(second.template)
        executable, nodes, *_, given = second.exec.args
        self.assertEqual((executable, given, second.direct), (EXECUTABLE, shared, True))
        self.assertEqual([node.handle for node in nodes], [10, 11])

    def test_kernels_one_by_one(self):
        """There is no executable."""
        given = template([kernel(0, 10), kernel(1, 11)])
        given = dataclasses.replace(given, numbers=("a number",))
        before = len(launcher.live_launchers)
        with mock.patch.object(native, "apart") as apart:
            made = ByNode(given, (1, 0))
        apart.assert_called_once_with(given, (1, 0))
        parts = given.nodes, given.slots, given.regions, given.numbers
        self.assertEqual(made.exec.args, (0, *parts, apart.return_value))
        self.assertEqual((made.nodes, made.direct), (2, True))
        self.assertIs(made.template, given)
        # It shares nothing, so no graph is dropped along with an executable.
        self.assertEqual((made.shared, made.patcher), (None, None))
        made.patch([5], [0])
        self.assertEqual(made.exec.patched, [([5], [0])])
        with self.assertRaisesRegex(RuntimeError, "there is no executable"):
            made.replay()
        made.forget()
        self.assertEqual(made.template, Template(1, (), (), given.numbers))
        self.assertEqual(made.nodes, 2)
        self.assertEqual(len(launcher.live_launchers), before)

    def test_copies_are_patched_from_python(self):
        node = CopyNode(0, 10, 1, 2, 64, 1, 1, 0, 0, 0, 0, src_on_host=True)
        with mock.patch.object(launcher, "upload") as upload:
            made = Launcher(Graph(), template([node]))
        self.assertIsNone(made.exec)  # so no call in C is made of it
        self.assertIsInstance(made.patcher, memcpy_nodes.Patcher)
        made.forget()  # it may make its executable anew, of all its nodes
        self.assertEqual(made.template.nodes, (node,))
        made.patch([0x1000])
        self.assertEqual(made.patcher.exec.patched, [([0x1000], None)])
        self.assertEqual(made.patcher.bases, [0x1000])
        self.assertIs(made.patcher.upload, upload)

    def test_launchers_that_live(self):
        made = Launcher(Graph(), template([kernel(0, 10)]))
        self.assertIn(made, launcher.live_launchers)
        before = len(launcher.live_launchers)
        del made
        gc.collect()
        self.assertEqual(len(launcher.live_launchers), before - 1)

    def test_upload(self):
        driver = mock.Mock()
        with (
            mock.patch.object(launcher, "NativeDriver", lambda: driver),
            mock.patch.object(torch.cuda, "current_stream") as stream,
        ):
            stream.return_value.cuda_stream = STREAM
            launcher.upload(Graph())
        driver.upload.assert_called_once_with(EXECUTABLE, STREAM)


@unittest.skipUnless(has_triton_package(), "Triton builds the module")
class TestByNode(TestCase):
    def test_launches(self):
        """However often it is launched, nothing is set, and no graph is launched."""
        folder = self.enterContext(tempfile.TemporaryDirectory())
        built, library = cuda_driver_stand_in.build_module(DRIVER + LAUNCHES, folder)
        module = native.complete(built.relaunch)
        self.enterContext(mock.patch.object(native, "implementation", lambda: module))
        library.reset(0)
        nodes = kernel(0, 10), EmptyNode(1, 11), kernel(2, 12)
        slots = tuple(PointerSlot(k, 0, 0, 0, k) for k in (0, 2))
        made = ByNode(Template(1, nodes, slots), (2, 1, 0))
        call = made.exec.call(
            positions=(0,),
            masks=(3,),
            allocations=(),
            slab=None,
            types=(),
            scratch=None,
            numbers=((), (), (), ()),
            order=(),
            recipes=((0, 0, 5, None, None, None),),  # what is given
            empty=self.fail,
            reinterpret=self.fail,
            outputs=None,
            replay=made.replay,
            direct=made.direct,
            raw=(None, None, 0, (0, 0, 0)),
            current=lambda: 0,
            index=0,
            stream_of=lambda index: STREAM,
            is_capturing=self.fail,
            misaligned=ValueError,
            counters={"test": {"launches": 0}},
            group="test",
            counter="launches",
        )
        x, y = torch.randn(4), torch.randn(4)
        for given in (x, x, x, x, y, x):
            self.assertEqual(call.attempt([given]), (5,))
            at = given.data_ptr()
            rows = [(4, 7, at + 2, 0, STREAM), (4, 7, at, 0, STREAM)]
            self.assertEqual(noted(library), rows)
        self.assertEqual((call.launches, call.by_node, call.patched), (6, 6, 0))


if __name__ == "__main__":
    run_tests()
