# Owner(s): ["module: dynamo"]

import operator
import threading
from unittest import mock

import torch
from torch._dynamo._streams import backward_tables, objects
from torch._dynamo._streams.backward_tables import add, from_end, queued, run
from torch._dynamo._streams.compiled_backward import (
    mark,
    mark_saved,
    StreamObject,
    write_stream_program,
)
from torch._functorch._streams.facts import fact_of, NOTHING, note_fact
from torch._functorch._streams.fx import BACKWARD, node_stream, place_on
from torch._functorch._streams.tokens import caller_event, CALLER
from torch.fx import Graph, GraphModule
from torch.testing._internal.common_utils import run_tests, TestCase


streams = torch.ops.streams


class Object:
    """A stream or event that logs what is called, with the current stream."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def __getattr__(self, method):
        return lambda *args: self.log.append(
            f"{self.name}.{method}({', '.join(arg.name for arg in args)})"
        )


class Interpreter(torch.fx.Interpreter):
    """Runs a graph whose operations only log their names."""

    log: list[str]

    def run_node(self, node):
        if node.op != "call_function":
            return super().run_node(node)
        if node.target in (torch.cuda.current_stream, torch.cuda.set_stream):
            args, _ = self.fetch_args_kwargs_from_env(node)
            self.log += [f"set {stream.name}" for stream in args]
            return Object("0", self.log)
        self.log.append(node.name)
        return Object(node.name, self.log)


class GraphCase(TestCase):
    def setUp(self):
        super().setUp()
        self.graph = Graph()
        self.x = self.graph.placeholder("x")
        self.number = 0

    def copy(self, value=None, stream=0, events=()):
        """An operation, as it is copied from a backward graph."""
        self.number += 1
        node = self.graph.call_function(torch.neg, (value or self.x,))
        node.name = f"op{self.number}"
        place_on(node, stream)
        after = tuple(sorted((CALLER, *map(caller_event, events))))
        note_fact(node, after=after, before=())
        return node

    def operation(self, target, *args):
        return self.graph.call_function(target, args)

    def write(self, result=None, saved=None):
        """What the graph calls, in order: the objects are named by their numbers."""
        self.graph.output(result)
        mark([n for n in self.graph.nodes if n.op == "call_function"], 1)
        if saved is not None:
            mark_saved(*saved, 1)
        self.gm = GraphModule({}, self.graph)
        self.needed = write_stream_program(self.gm)
        log = []
        for found in self.needed:
            setattr(self.gm, found.name, Object(str(found.index), log))
        interpreter = Interpreter(self.gm)
        interpreter.log = log
        interpreter.run(Object("x", log))
        return log


class TestProgram(GraphCase):
    def test_operations_run_on_their_streams(self):
        first = self.copy()
        side = self.copy(first, stream=1)
        other = self.copy(side, stream=1)
        self.assertEqual(
            self.write(self.copy(other)),
            [
                "1.wait_stream(0)",
                "op1",
                "set 1",
                "op2",
                "op3",
                "set 0",
                "op4",
                "0.wait_stream(1)",
                "1.wait_stream(0)",
            ],
        )
        self.assertEqual(self.needed, (StreamObject(1, 1),))

    def test_stream_is_left_at_the_end(self):
        self.assertEqual(
            self.write(self.copy(stream=2)),
            [
                "2.wait_stream(0)",
                "set 2",
                "op1",
                "set 0",
                "0.wait_stream(2)",
                "2.wait_stream(0)",
            ],
        )

    def test_all_side_streams_wait_for_each_other_at_the_end(self):
        self.copy(stream=1)
        found = self.write(self.copy(stream=2))
        joins = ["0.wait_stream(1)", "0.wait_stream(2)"]
        joins += ["1.wait_stream(0)", "2.wait_stream(0)"]
        self.assertEqual(found[-4:], joins)

    def test_events_of_the_caller(self):
        found = self.write(self.copy(stream=1, events=[7, 5]))
        at = found.index("set 1")
        waits = ["1.wait_event(5)", "1.wait_event(7)", "op1"]
        self.assertEqual(found[at + 1 : at + 4], waits)

    def test_event_of_an_operation_on_the_callers_stream(self):
        self.assertEqual(self.write(self.copy(events=[5])), ["0.wait_event(5)", "op1"])

    def test_memory_of_saved_values(self):
        """Who reads it on another stream than its owner's is recorded."""
        value = self.graph.call_function(operator.getitem, (self.x, 0))
        self.copy(value, stream=2)
        view = self.graph.call_function(torch.ops.aten.t.default, (value,))
        self.copy(view, stream=3)
        self.copy(value, stream=1)
        self.copy(value)
        found = self.write(value, saved=(value, 1))
        recorded = [call for call in found if "record_stream" in call]
        expected = [f"{value.name}.record_stream({stream})" for stream in (0, 2, 3)]
        self.assertEqual(sorted(recorded), expected)
        waits = [call for call in found[:-6] if "wait_stream" in call]
        waiting = [f"{stream}.wait_stream(0)" for stream in (2, 3, 1)]
        self.assertEqual(waits, ["0.wait_stream(1)", *waiting])

    def test_memory_that_only_the_callers_stream_reads(self):
        value = self.graph.call_function(operator.getitem, (self.x, 0))
        found = self.write(self.copy(value), saved=(value, 1))
        record = f"{value.name}.record_stream(0)"
        self.assertEqual(found, ["0.wait_stream(1)", value.name, record, "op1"])

    def test_graph_without_streams(self):
        node = self.copy()
        self.assertEqual(self.write(node), ["op1"])
        self.assertEqual(self.needed, ())
        self.assertEqual(len(self.gm.graph.nodes), 3)

    def test_code_is_that_of_the_graph(self):
        self.write(self.copy(stream=1))
        self.assertIn("wait_stream", self.gm.code)

    def test_facts_of_forward_and_engine_are_dropped(self):
        node = self.copy(stream=1)
        node.meta |= {BACKWARD: True, "partitioner_tag": "is_backward"}
        mark([node], 1)
        self.assertEqual((node_stream(node), fact_of(node)), (0, NOTHING))
        self.assertTrue(node.meta.keys().isdisjoint((BACKWARD, "partitioner_tag")))


class TestOperations(GraphCase):
    """Of a stream program in a backward."""

    def test_calls_of_eager_code(self):
        for target, args, call in (
            (streams.record_event.default, (5, 1), "5.record(1)"),
            (streams.wait_event.default, (5, 1), "1.wait_event(5)"),
            (streams.wait_stream.default, (1, 0), "1.wait_stream(0)"),
            (streams.synchronize_event.default, (5,), "5.synchronize()"),
            (streams.synchronize_stream.default, (1,), "1.synchronize()"),
        ):
            self.setUp()
            self.operation(target, *args)
            self.assertEqual(self.write(), [call])

    def test_record_stream(self):
        value = self.copy()
        self.operation(streams.record_stream.default, value, 2)
        self.assertEqual(self.write(), ["op1", "op1.record_stream(2)"])

    def test_device_synchronization_stays(self):
        node = self.operation(streams.synchronize_device.default, "cuda", 0)
        self.assertEqual(self.write(), [node.name])

    def test_operation_that_there_is_no_call_for(self):
        self.operation(streams.fork.default, 1, 0)
        with self.assertRaisesRegex(NotImplementedError, "streams.fork.default in the"):
            self.write()

    def test_operations_do_not_switch_streams(self):
        self.copy(stream=1)
        self.operation(streams.record_event.default, 5, 1)
        self.copy(stream=1)
        found = self.write()
        self.assertEqual(found.count("set 1"), 1)
        self.assertEqual(found[2:5], ["op1", "5.record(1)", "op2"])


class Stream:
    """Stands for torch.cuda.Stream, which can't be made without a GPU."""

    def __init__(self, name, log):
        self.name = self.cuda_stream = name
        self.log = log

    def wait_stream(self, other):
        self.log.append(f"{self.name} after {other.name}")


class TestTables(TestCase):
    def setUp(self):
        super().setUp()
        self.addCleanup(setattr, backward_tables._thread, "queue", None)
        self.log = []
        self.gm = torch.nn.Module()

    def table(self, *contents):
        return objects.Snapshot(contents)

    def test_position_from_the_end(self):
        first, second = self.table("a"), self.table("b")
        for table in (first, second):
            add(table)
        self.assertEqual([from_end(t) for t in (first, second)], [2, 1])
        add(first)
        self.assertEqual([from_end(t) for t in (first, second)], [1, 2])
        self.assertEqual(len(queued()), 2)

    def test_threads_have_queues_of_their_own(self):
        add(self.table("a"))
        lengths = []
        other = threading.Thread(target=lambda: lengths.append(len(queued())))
        other.start()
        other.join()
        self.assertEqual((lengths, len(queued())), ([0], 1))

    def run_graph(self, tables, needed, fails=False):
        for contents in tables:
            add(self.table(*contents))

        def call():
            found = [getattr(self.gm, n.name, None) for n in needed]
            self.log.append([getattr(f, "name", f) for f in found])
            if fails:
                raise ZeroDivisionError
            return "the result"

        here = self.streams("a", "b", "here")[-1]
        with (
            mock.patch.object(torch.cuda, "Stream", Stream),
            mock.patch.object(objects, "callers_stream", lambda: here),
        ):
            result = run(call, self.gm, needed)
        self.assertEqual(queued(), [])
        for found in needed:
            self.assertIsNone(getattr(self.gm, found.name, None))
        return result

    def streams(self, *names):
        return [Stream(name, self.log) for name in names]

    def test_objects_are_there_for_the_call(self):
        caller, side = "caller", "side"
        needed = (StreamObject(1, 1), StreamObject(2, 1))
        tables = [("failed", 0), (caller, side), (caller, "event")]
        self.assertEqual(self.run_graph(tables, needed), "the result")
        self.assertEqual(self.log, [["event", "side"]])

    def test_streams_of_the_forwards(self):
        a, b, here = self.streams("a", "b", "here")
        self.run_graph([(a,), (b,), (here,), (a,)], ())
        before, after = (
            ["here after a", "here after b"],
            ["a after here", "b after here"],
        )
        self.assertEqual(self.log, [*before, [], *after])

    def test_call_that_fails(self):
        (a,) = self.streams("a")
        needed = (StreamObject(1, 1),)
        with self.assertRaises(ZeroDivisionError):
            self.run_graph([(a, "side")], needed, fails=True)
        self.assertEqual(self.log, ["here after a", ["side"], "a after here"])
        self.assertIsNone(getattr(self.gm, needed[0].name))
        self.assertEqual(queued(), [])

    def test_backward_without_tables(self):
        """It need not be one of CUDA."""
        none = mock.patch.object(objects, "callers_stream", side_effect=AssertionError)
        with none:
            self.assertEqual(run(lambda: "the result", self.gm, ()), "the result")


if __name__ == "__main__":
    run_tests()
