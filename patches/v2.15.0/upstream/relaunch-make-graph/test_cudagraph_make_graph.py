# Owner(s): ["module: inductor"]

import contextlib
import mmap
from types import SimpleNamespace
from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch import (
    capture as captures,
    library_calls,
    make_graph as module,
)
from torch._inductor.cudagraph_relaunch.allocations import ALLOCATOR, Plan
from torch._inductor.cudagraph_relaunch.any_size import Seen
from torch._inductor.cudagraph_relaunch.compiled_code import Code
from torch._inductor.cudagraph_relaunch.make_graph import (
    make_graph,
    make_graph_for_any_size,
    Work,
)
from torch._inductor.cudagraph_relaunch.nodes import CapturedGraph, KernelNode, Refusal
from torch._inductor.cudagraph_relaunch.order import only_order
from torch._inductor.cudagraph_relaunch.outputs import view_of
from torch._inductor.cudagraph_relaunch.prove import prove
from torch._inductor.cudagraph_relaunch.sizes import MOST, Sizes
from torch._inductor.cudagraph_relaunch.traced import Escaped
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.utils._python_dispatch import _disable_current_modes


CPU, CODE, ONE = torch.device("cpu"), Code("a region", 0), Plan(frozenset([1]))


class Recording:
    """Addresses in a block of memory, and the kernels that are launched there."""

    device, fixed, closed = CPU, (), False

    def __init__(self, gap):
        self.memory = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8)
        self.low = self.memory.data_ptr()
        self.next, self.gap = self.low + 4096, 256 * gap
        self.high, self.taken, self.launched = self.low + (1 << 20), [], []

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass

    def place(self, view, alignment=256):
        at = self.next
        self.next = -(-(at + view.extent + self.gap) // 256) * 256
        self.taken.append((at, view.extent))
        with _disable_current_modes():
            storage = torch._C._construct_storage_from_data_pointer(
                at, CPU, view.extent
            )
            made = torch.empty(0, dtype=view.dtype)
            return made.set_(storage, 0, view.size, view.stride)

    def capturing(self, inputs, random):
        return torch.no_grad()

    def noting_lines(self, namespace):
        return contextlib.nullcontext()

    def clear_stack(self):
        pass

    def covers(self, address):
        return self.low <= address < self.high

    def segments(self):
        return self.taken

    def kept(self):
        return []

    def nodes(self):
        return [*range(len(self.launched))]

    def count(self):
        return len(self.launched)

    def allocations_made(self):
        return len(self.taken)

    def allocations(self, first):
        return self.taken[first:]

    def without_modes(self):
        return contextlib.nullcontext()

    def new_pool(self):
        return contextlib.nullcontext()

    def within(self, pool):
        return pool

    def graph(self, segments):
        nodes = [
            KernelNode(i, i, "add", 7, 0, 0, grid, (32, 1, 1), 0, words)
            for i, (grid, words) in enumerate(self.launched)
        ]
        edges = tuple((i, i + 1) for i in range(len(nodes) - 1))
        return CapturedGraph(tuple(nodes), edges, tuple(segments), self.low, self.high)

    def close(self):
        self.closed = True

    discard = close


class Device:
    concurrent = by_nodes = False  # `by_nodes`: kernels can be launched one by one

    def __init__(self):
        self.recordings, self.proofs, self.failing, self.made = [], [], [], []

    def record(self, gap, inputs):
        self.recordings.append(Recording(gap))
        return self.recordings[-1]

    def read(self, captured):
        return captured.recording.graph(captured.segments)

    def prove(self, graphs, namespace):
        self.proofs.append([len(graph.nodes) for graph in graphs])
        if self.failing:
            raise Refusal(self.failing.pop(0), "not proven")
        return prove(*graphs)

    def relax(self, captured, graph, template, namespace):
        return graph.edges

    def instantiate(self, captured, arrangement, varies=None):
        self.made.append(varies is not None)

        def like(template):
            return template

        return arrangement, [SimpleNamespace(shared=len(self.made), like=like)]

    def order_of(self, captured, graph):
        return only_order(len(graph.nodes), graph.edges) if self.by_nodes else None

    def by_node(self, template, order):
        self.made.append(order)
        return SimpleNamespace(shared=None)

    @property
    def gaps(self):
        return [recording.gap // 256 for recording in self.recordings]


class Kernel:
    """What generated code has as a global: gets tensors and a number n."""

    arg_tys = "OOl"

    def __init__(self, device, grid="-(n // -4)"):
        self.device = device
        scope = {"runner": self.launch}
        text = "def launcher(x, out, n, stream):\n"
        text += f"    runner({grid}, 1, 1, stream, x, out, n)"
        exec(text, scope)
        scope["launcher"]._is_static = True
        self.launchers = [scope["launcher"]]

    def run(self, *args, stream):
        self.launchers[0](*args, stream=stream)

    def launch(self, x, y, z, stream, *args):
        words = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in args]
        parameters = tuple(
            (8 * i, w.to_bytes(8, "little")) for i, w in enumerate(words)
        )
        self.device.recordings[-1].launched.append(((x, y, z), parameters))


REGION = """x, n = args
args.clear()
a = new((4,), (1,), torch.float32)
kernel.run(x, a, 4, stream=0)
b = new((4,), (1,), torch.float32)
kernel.run(a, b, n, stream=0)
return (b,)"""


LAYERS = """x, n = args
args.clear()
for _ in range(CALLS):
    x, y = new((n,), (1,), torch.float32), x
    extern_kernels.leaf(y, out=x)
return (x,)"""


class TestMakeGraph(TestCase):
    def setUp(self):
        super().setUp()
        tensors = mock.Mock(side_effect=lambda value: isinstance(value, torch.Tensor))
        self.enterContext(mock.patch.object(captures, "is_region", tensors))
        self.device, self.sizes = Device(), Sizes(8)
        self.device.holes = mock.Mock(return_value=[])

    def tearDown(self):
        self.assertTrue(all(recording.closed for recording in self.device.recordings))
        super().tearDown()

    def work(self, text=REGION, plan=ONE, n=7, code=CODE, **fields):
        allocate = mock.Mock(side_effect=AssertionError("it is observed"))
        self.scope = {
            "torch": torch,
            "kernel": Kernel(self.device),
            ALLOCATOR: allocate,
        }
        self.scope["device"] = self.device
        text = text.replace("new(", f"{ALLOCATOR}(").replace("\n", "\n    ")
        exec(f"def call(args):\n    {text}", self.scope)
        inputs = [torch.empty(4), n]
        given = self.device, self.scope["call"], inputs, [16, 1], plan, code, self.sizes
        return Work(*given, **fields)

    def test_steps(self):
        arrangement, launchers = make_graph(self.work())
        self.assertEqual((self.device.gaps, self.device.proofs), ([1, 2], [[2, 2]]))
        self.assertEqual((len(launchers), self.device.made), (1, [False]))
        layout = arrangement.layout
        self.assertEqual((layout.inputs, layout.own), ((0,), (0,)))
        slots = {(s.node, s.parameter): s.region for s in arrangement.template.slots}
        x, out, scratch = 0, 1, layout.scratch_region
        wanted = {(0, 0): x, (0, 1): scratch, (1, 0): scratch, (1, 1): out}
        self.assertEqual(slots, wanted)
        self.device.holes.assert_not_called()  # nothing is saved

    def test_outputs_that_a_capture_learns(self):
        arrangement, _ = make_graph(self.work(plan=Plan()))
        self.assertEqual(self.device.gaps, [1, 1, 2])
        self.assertEqual(arrangement.layout.scratch_size, 512)

    def test_coincidences(self):
        self.device.failing = ["unmoved"]
        make_graph(self.work())
        self.assertEqual((self.device.gaps, len(self.device.proofs)), ([1, 2, 3, 5], 2))
        self.device.failing = ["ambiguous", "unmoved"]
        with self.assertRaisesRegex(Refusal, "not proven"):
            make_graph(self.work())

    def test_what_is_no_coincidence(self):
        self.device.failing = ["edges"]
        with self.assertRaisesRegex(Refusal, "not proven"):
            make_graph(self.work())
        self.assertEqual(self.device.gaps, [1, 2])

    def test_captures_that_differ(self):
        text = f"{REGION} if len(device.recordings) % 2 else (b, None)"
        with self.assertRaisesRegex(Refusal, "differ in their outputs or in") as caught:
            make_graph(self.work(text))
        self.assertEqual(caught.exception.reason, "layout")

    def test_errors_of_the_region(self):
        region = REGION.replace("a, b, n, stream", "a, b, 4, stream")
        text = region.replace("return", "[][0]\nreturn")
        with self.assertRaises(IndexError):
            make_graph(self.work(text))
        with self.assertRaisesRegex(Escaped, "IndexError") as caught:
            make_graph(self.work(text, numbers={1: 7}))
        self.assertEqual(caught.exception.positions, {1})
        full = region.replace("return", "raise torch.OutOfMemoryError('full')\nreturn")
        with self.assertRaises(torch.OutOfMemoryError):
            make_graph(self.work(full, numbers={1: 7}))

    def test_numbers(self):
        text = REGION.replace("kernel.run(a, b, n,", "plain.run(a, b, n,")
        work = self.work(text, numbers={1: 7})
        self.scope["plain"] = Kernel(self.device, grid="1")
        arrangement, _ = make_graph(work)
        (slot,) = arrangement.template.numbers
        self.assertEqual((slot.node, slot.parameter, slot.letter), (1, 2, "l"))
        self.assertEqual(slot.expression, ("input", 1, int))
        with self.assertRaisesRegex(
            Escaped, "the grid of a kernel is computed from it"
        ):
            make_graph(self.work(numbers={1: 7}))

    def test_sizes_that_share_an_executable(self):
        make_graph(self.work(is_shared=True))
        self.assertEqual((self.device.gaps, self.device.made), ([1, 2], [True]))
        _, launchers = make_graph(self.work(n=9, is_shared=True))
        # One capture, for the function is known, and no executable.
        self.assertEqual((self.device.gaps, self.device.made), ([1, 2, 1], [True]))
        (template,) = launchers
        values = [value for _, value in template.nodes[1].parameters]
        self.assertEqual(values[2], (9).to_bytes(8, "little"))

    def capture_layers(self, n, calls=3, **plan):
        """Return how many kernels were launched in each recording of so many calls of a
        library."""

        def leaf(x, *, out):
            self.scope["kernel"].run(x, out, len(out), stream=0)

        text = LAYERS.replace("CALLS", str(calls))
        plan = Plan(frozenset([calls - 1]), **plan)
        work = self.work(text, plan, n, is_shared=True)
        self.scope["extern_kernels"] = SimpleNamespace(leaf=leaf)
        before = len(self.device.recordings)
        with mock.patch.object(library_calls, "LEAVES", (leaf,)):
            arrangement, _ = make_graph(work)
        self.assertEqual(len(arrangement.template.nodes), calls)
        return [len(made.launched) for made in self.device.recordings[before:]]

    def test_calls_of_libraries_that_repeat_earlier_ones(self):
        captures = self.capture_layers
        self.assertEqual([captures(n) for n in (4, 5, 6)], [[3, 1], [3], [3]])
        # The first call is like no other, for its input has another size.
        self.assertEqual([captures(n) for n in (7, 8)], [[2], [2]])
        # No executable has as many nodes, or draws random numbers.
        self.assertEqual(captures(9, calls=4), [2, 4])
        self.assertEqual(self.sizes.differed, 1)
        self.assertEqual([captures(n) for n in (10, 11, 12)], [[3], [3], [2]])
        self.assertEqual(self.sizes.differed, 0)
        self.assertEqual(captures(13, drawn=(8,)), [2, 3])
        self.assertEqual((self.device.made, self.sizes.differed), ([True] * 3, 1))

    def test_graphs_without_an_executable(self):
        """They leave out calls, whatever the number of their nodes."""
        self.device.by_nodes = True
        self.sizes.numbers_of = mock.Mock(side_effect=self.sizes.numbers_of)
        captures, most = self.capture_layers, range(2, 2 + MOST)
        made = [captures(20 + calls, calls) for calls in most]
        self.assertEqual(made, [[2, 1], *[[calls] for calls in most[1:]]])
        self.assertEqual([captures(30, calls=9), captures(31, calls=8)], [[9], [2]])
        self.sizes.numbers_of.assert_called_once_with(8)
        orders = [tuple(range(calls)) for calls in (9, 8)]
        self.assertEqual(self.device.made, [*[True] * MOST, *orders])
        # One that fits leaves out calls, too.
        self.assertEqual((captures(32), self.sizes.differed), ([2], 0))

    def test_holes_of_the_allocator(self):
        code = Code("forward", 0, saved_outputs=frozenset([0]))
        make_graph(self.work(code=code))
        self.device.holes.assert_called_once_with()

    def test_any_size(self):
        text = REGION.replace("(4,)", "(n,)").replace("x, a, 4,", "x, a, n,")
        work = self.work(text, n=4, numbers={1: 4})
        seen = Seen({1: 6}, {0: view_of(torch.empty(6))})
        arrangement, launchers, sized = make_graph_for_any_size(work, seen)
        self.assertEqual((len(launchers), self.device.gaps), (1, [1, 2]))
        self.assertEqual(
            len(arrangement.template.numbers), 4
        )  # n and a grid of it, twice
        self.assertIsNotNone(sized.scratch)

    def test_checks_come_first(self):
        text = f"{REGION}\ntorch.ops._c10d_functional.wait_tensor(x)"
        for make in (make_graph, lambda work: make_graph_for_any_size(work, None)):
            with self.assertRaisesRegex(Refusal, "it contains collectives"):
                make(self.work(text))
        self.assertEqual(self.device.recordings, [])

    def test_one_capture_at_a_time(self):
        self.assertTrue(module.capturing.acquire(blocking=False))
        self.assertFalse(module.capturing.acquire(blocking=False))
        module.capturing.release()


if __name__ == "__main__":
    run_tests()
