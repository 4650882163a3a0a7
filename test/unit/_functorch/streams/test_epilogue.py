"""Updates and views that AOTAutograd makes after the graph, on the streams of eager."""

import contextlib
from unittest import mock

import torch
import torch._dynamo.variables.streams
from functorch.compile import aot_function, make_boxed_func
from torch.fx.traceback import annotate, preserve_node_meta
from torch.testing._internal.common_utils import TestCase
from torch.utils._python_dispatch import TorchDispatchMode

import form  # noqa: F401
from torch_overlay import config, frame_facts
from torch_overlay._dynamo import objects
from torch_overlay._functorch.streams.facts import fact_of
from torch_overlay._functorch.streams.fx import is_stream_op
from torch_overlay.frame_facts import FrameFacts, ObjectInfo


streams = torch.ops.streams
CALLER, SIDE, OTHER, EVENT = range(4)


class Event:
    """An event that says on which stream it is recorded, and what a tensor is then."""

    def __init__(self):
        self.log, self.seen = [], None

    def record(self, stream):
        self.log.append((stream, self.seen.tolist()))


class Launches(TorchDispatchMode):
    """The operators that run in blocks on streams, with the stream."""

    def __init__(self):
        super().__init__()
        self.current, self.found = ["caller"], []

    @contextlib.contextmanager
    def stream(self, which):
        self.current.append(self.current[-1] if which is None else which)
        self.found.append((self.current[-1], None))
        yield
        self.current.pop()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found.append((self.current[-1], func._opname))
        return func(*args, **(kwargs or {}))


class EpilogueCase(TestCase):
    """Programs on the host, where numbers of streams are marks of nodes."""

    def setUp(self):
        super().setUp()
        device = torch.device("cuda", 0)
        given = [ObjectInfo(index, "caller", True, "stream", device) for index in (CALLER, SIDE, OTHER)]
        given.append(ObjectInfo(EVENT, "caller", True, "event", None))
        self.enterContext(frame_facts.compiling(FrameFacts(tuple(given))))
        self.event = Event()
        self.addCleanup(objects.enter("caller", "side", "other", self.event))

    def compiled(self, f):
        def compiler(gm, _):
            self.graph = gm.graph
            run = torch.fx.GraphModule(gm, gm.graph)
            for node in filter(is_stream_op, run.graph.nodes):
                run.graph.erase_node(node)  # it asks for streams of a device
            run.recompile()
            return make_boxed_func(run.forward)

        made = aot_function(f, fw_compiler=compiler)

        def call(*inputs):
            patch = config.patch(streams=True)
            with patch, preserve_node_meta():
                return made(*inputs)

        return call


class TestUpdates(EpilogueCase):
    """Updates that autograd has to see, which the epilogue copies into inputs."""

    def test_event_of_an_update_is_recorded_after_the_copy(self):
        def f(x):
            with annotate({"stream": SIDE}):
                x.mul_(2)
            streams.record_event.default(EVENT, SIDE)
            streams.wait_stream.default(CALLER, SIDE)
            return x.sin()

        x = torch.ones(2, requires_grad=True) * 3
        self.event.seen = x
        result = self.compiled(f)(x)
        self.assertEqual(self.event.log, [("side", [6.0, 6.0])])
        self.assertEqual(result, torch.full((2,), 6.0).sin())

    def test_update_that_nothing_comes_after(self):
        def f(x):
            streams.record_event.default(EVENT, CALLER)
            streams.wait_stream.default(SIDE, CALLER)
            with annotate({"stream": SIDE}):
                y = x + 1
            streams.wait_stream.default(CALLER, SIDE)
            x.mul_(2)
            return y.cos()

        x = torch.ones(2, requires_grad=True) * 3
        result = self.compiled(f)(x)
        self.assertEqual(self.event.log, [])
        self.assertEqual(x, torch.full((2,), 6.0))
        self.assertEqual(result, torch.full((2,), 4.0).cos())


class TestViews(EpilogueCase):
    """Results that are views, which the epilogue makes anew."""

    def launches(self, f, x):
        """What runs in a call, with the stream, and the result."""
        call = self.compiled(f)
        call(x)
        launches = Launches()
        with mock.patch.object(torch.cuda, "stream", launches.stream), launches:
            return launches.found, call(x)

    def test_view_of_an_input(self):
        def f(x):
            y = x * 2
            streams.wait_stream.default(SIDE, CALLER)
            with annotate({"stream": SIDE}):
                view = x.view(-1)
            streams.wait_stream.default(CALLER, SIDE)
            return view, y

        x = torch.randn(2, 3, requires_grad=True)
        found, (view, _) = self.launches(f, x)
        # Eager makes the node that accumulates for the multiplication.
        blocks = [stream for stream, operator in found if operator is None]
        self.assertEqual(blocks, ["caller", "side"])
        self.assertEqual([s for s, o in found if o == "view"][-1], "side")
        self.assertIs(view._base, x)
        (view * 3).sum().backward()
        self.assertEqual(x.grad, torch.full((2, 3), 3.0))

    def test_view_of_a_result(self):
        def f(x):
            y = x * 2
            streams.wait_stream.default(SIDE, CALLER)
            with annotate({"stream": SIDE}):
                view, z = y.view(-1), y.sin()
            streams.wait_stream.default(CALLER, SIDE)
            return view, y, z

        found, (view, result, _) = self.launches(f, torch.ones(2, 3, requires_grad=True))
        self.assertEqual([s for s, o in found if o == "view"][-1], "side")
        self.assertIs(view._base, result)

    def test_view_on_the_callers_stream(self):
        def f(x):
            streams.wait_stream.default(SIDE, CALLER)
            with annotate({"stream": SIDE}):
                y = x * 2
            streams.wait_stream.default(CALLER, SIDE)
            return x.view(-1), y

        found, _ = self.launches(f, torch.ones(2, 3, requires_grad=True))
        self.assertEqual({stream for stream, _ in found}, {"caller"})

    def test_view_without_a_gradient(self):
        def f(x):
            with annotate({"stream": SIDE}):
                view = x.view(-1)
                y = x * 2
            streams.wait_stream.default(CALLER, SIDE)
            return view, y

        found, _ = self.launches(f, torch.ones(2, 3))
        self.assertEqual({stream for stream, _ in found}, {"caller"})

    def test_outputs_that_are_dropped(self):
        """The graph returns a view of its input, and the caller gets another one."""

        def f(x):
            with annotate({"stream": SIDE}):
                y = x * 2
            streams.wait_stream.default(CALLER, SIDE)
            return x.view(-1), y.view(-1)

        self.compiled(f)(torch.ones(2, 3))
        ours, theirs = self.graph.output_node().all_input_nodes
        self.assertTrue(fact_of(ours).is_dropped)
        self.assertFalse(fact_of(theirs).is_dropped)
