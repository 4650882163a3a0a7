"""`_dynamo.run_time_values`: answers of events that only the run knows."""

from unittest import mock

import torch
import torch._dynamo.config
from torch._dynamo import symbolic_convert
from torch._dynamo.exc import UserError
from torch._dynamo.test_case import TestCase
from torch._dynamo.testing import CompileCounter
from torch._dynamo.variables.base import Method
from torch._dynamo.variables.streams import EventVariable

import form  # noqa: F401
from torch_overlay._dynamo import ops
from torch_overlay._dynamo.state import StreamState


def query(event, tx, args, kwargs):
    from torch_overlay._dynamo.run_time_values import runtime_bool

    return runtime_bool(tx, ops.query_event, event.user_object_index)


def elapsed_time(start, tx, args, kwargs):
    from torch_overlay._dynamo.run_time_values import runtime_scalar

    first, last = start.user_object_index, args[0].user_object_index
    return runtime_scalar(tx, ops.elapsed_time, first, last)


class Work(torch.Event):
    """An event that happens when the test says so."""

    done, at = False, 0.0

    def query(self):
        return self.done

    def elapsed_time(self, end):
        return end.at - self.at


class TestRunTimeValues(TestCase):
    def setUp(self):
        super().setUp()
        methods = {"query": Method(query), "elapsed_time": Method(elapsed_time)}
        for patch in (
            mock.patch.dict(EventVariable.tp_methods, methods),
            mock.patch.object(symbolic_convert, "SymbolicStreamState", StreamState),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        self.start, self.end = Work("cuda"), Work("cuda")
        self.x = torch.ones(3)

    def compiled(self, function, fullgraph=True):
        self.counter = CompileCounter()
        compiled = torch.compile(function, backend=self.counter, fullgraph=fullgraph)
        return lambda: compiled(self.x, self.start, self.end)

    def test_bool_of_each_run(self):
        call = self.compiled(lambda x, start, end: (x + 1, start.query()))
        found = []
        for self.start.done in (False, True, False):
            found.append(call()[1])
        self.assertEqual(found, [False, True, False])
        self.assertIs(type(found[0]), bool)
        self.assertEqual(self.counter.frame_count, 1)

    def test_number_of_each_run(self):
        def f(x, start, end):
            ms = start.elapsed_time(end)
            return x * ms, ms / 2

        call = self.compiled(f)
        for self.end.at in (1.5, 4.0):
            product, half = call()
            self.assertEqual(product, self.x * self.end.at)
            self.assertEqual(half, self.end.at / 2)
        self.assertEqual(self.counter.frame_count, 1)

    def test_branch_is_taken_when_the_code_runs(self):
        def f(x, start, end):
            if start.query():
                return x + 1
            return x - 1

        call = self.compiled(f, fullgraph=False)
        self.assertEqual(call(), self.x - 1)
        self.start.done = True
        self.assertEqual(call(), self.x + 1)

    def test_branch_in_one_graph_is_an_error(self):
        call = self.compiled(lambda x, start, end: x + 1 if start.query() else x)
        said = "branch on whether an event has happened.*Leave out fullgraph.*synchro"
        with self.assertRaisesRegex(UserError, said):
            call()

    def test_branch_on_a_time_in_one_graph(self):
        call = self.compiled(lambda x, start, end: x + 1 if start.elapsed_time(end) > 1 else x)
        with self.assertRaisesRegex(UserError, "branch on what the run reads") as error:
            call()
        self.assertNotIn("synchronize", str(error.exception))

    def test_branch_on_another_number_keeps_its_error(self):
        def f(x, start, end):
            done = start.query()
            return (x + 1 if x.sum().item() > 3 else x), done

        with (
            torch._dynamo.config.patch(capture_scalar_outputs=True),
            self.assertRaisesRegex(UserError, "torch._check"),
        ):
            self.compiled(f)()

    def test_option_of_the_user_stays(self):
        def f(x, start, end):
            done = start.query()
            return x * x.sum().item(), done

        call = self.compiled(f, fullgraph=False)
        with torch._dynamo.config.patch(capture_scalar_outputs=False):
            self.assertEqual(call(), (self.x * 3, False))
        self.assertEqual(self.counter.frame_count, 2)  # item() breaks the graph
