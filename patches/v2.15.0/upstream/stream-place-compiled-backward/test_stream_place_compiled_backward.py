# Owner(s): ["module: dynamo"]

from unittest import mock

import torch
import torch._dynamo.compiled_autograd
import torch._dynamo.variables.streams  # has the operators of torch.ops.streams
import torch._functorch.config
from functorch.compile import aot_function, make_boxed_func
from torch._dynamo._streams import backward_tables, objects
from torch._dynamo.compiled_autograd import _enable
from torch._functorch._aot_autograd import runtime_wrappers
from torch.fx.traceback import annotate, preserve_node_meta
from torch.testing._internal.common_utils import run_tests, TestCase


streams = torch.ops.streams
SIDE = 1


class Stream:
    """A stream that logs what is called."""

    def __init__(self, name, log):
        self.name, self.log, self.cuda_stream = name, log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class Interpreter(torch.fx.Interpreter):
    """Runs compiled autograd's graph, and logs the operators and the streams."""

    def __init__(self, gm, log, current):
        super().__init__(gm)
        self.log, self.current = log, current

    def call_function(self, target, args, kwargs):
        if target is torch.cuda.current_stream:
            return self.current
        if target is torch.cuda.set_stream:
            self.log.append(f"set {args[0].name}")
            return None
        if isinstance(target, torch._ops.OpOverload):
            self.log.append(target._opname)
        return super().call_function(target, args, kwargs)

    def call_method(self, target, args, kwargs):
        if target == "record_stream":
            self.log.append(f"{args[1].name} reads")
            return None
        return super().call_method(target, args, kwargs)


class TestCompiledBackwards(TestCase):
    """Backwards of programs on the host, where numbers of streams mark nodes."""

    def setUp(self):
        super().setUp()
        self.log, self.graphs = [], []
        torch._dynamo.compiled_autograd.reset()
        for patch in (
            torch._functorch.config.patch(stream_placement=True),
            mock.patch.object(
                runtime_wrappers, "_snapshot_external_objects", self.save
            ),
            mock.patch.object(
                objects, "callers_stream", lambda: self.stream("current")
            ),
        ):
            patch.__enter__()
            self.addCleanup(patch.__exit__, None, None, None)

    def stream(self, name):
        return Stream(name, self.log)

    def save(self, ctx):
        """Save the streams of the forward's call, as `self.names` has them."""
        ctx._external_objects = objects.Snapshot(list(map(self.stream, self.names)))

    def compiled(self, f):
        def compiler(gm, _):
            return make_boxed_func(gm.forward)

        made = aot_function(f, fw_compiler=compiler)

        def call(*inputs, names=("caller", "side")):
            self.names = names
            with preserve_node_meta():
                return made(*inputs)

        return call

    def backward(self, loss):
        """What compiled autograd's graph calls, in order."""

        def compiler(gm):
            self.graphs.append(gm)
            interpreter = Interpreter(gm, self.log, self.stream("current"))
            return lambda *args: list(interpreter.run(*args))

        self.log.clear()
        with _enable(compiler):
            loss.backward()
        return list(self.log)

    @staticmethod
    def forked(x):
        streams.wait_stream.default(SIDE, 0)
        with annotate({"stream": SIDE}):
            y = x.sin()
        streams.wait_stream.default(0, SIDE)
        return y.cos()

    def test_operations_run_on_their_streams(self):
        x = torch.randn(4, requires_grad=True)
        loss = self.compiled(self.forked)(x).sum()
        log = self.backward(loss)
        self.assertEqual(
            log,
            [
                "current waits for side",  # for the saved sin()
                "side waits for current",
                "current reads",
                "sin",
                "neg",
                "mul",
                "set side",
                "cos",
                "mul",
                "set current",
                "current waits for side",
                "side waits for current",
            ],
        )
        self.assertEqual(x.grad, -x.sin().sin() * x.cos())

    def test_same_graph_with_other_streams(self):
        call = self.compiled(self.forked)
        x = torch.randn(4, requires_grad=True)
        first = self.backward(call(x).sum())
        x.grad = None
        second = self.backward(call(x, names=("caller", "other")).sum())
        self.assertEqual(len(self.graphs), 1)
        self.assertEqual(second, [line.replace("side", "other") for line in first])

    def test_two_functions(self):
        """Each has a table of its own, found by its place among the nodes that run."""
        x = torch.randn(4, requires_grad=True)
        first, second = self.compiled(self.forked), self.compiled(self.forked)
        y = first(x, names=("caller", "a"))
        log = self.backward(second(y, names=("caller", "b")).sum())
        self.assertEqual(
            [s for s in log if s.startswith("set")],
            ["set b", "set current", "set a", "set current"],
        )

    def test_streams_are_dropped_after_the_call(self):
        x = torch.randn(4, requires_grad=True)
        call = self.compiled(self.forked)
        self.backward(call(x).sum())
        self.assertEqual(backward_tables.queued(), [])
        for gm in self.graphs:
            self.assertIsNone(gm.backward_1_object_1)

    def test_function_without_streams(self):
        x = torch.randn(4, requires_grad=True)
        log = self.backward(self.compiled(torch.sin)(x).sum())
        self.assertEqual(log, ["cos", "mul"])


if __name__ == "__main__":
    run_tests()
