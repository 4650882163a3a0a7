# Owner(s): ["module: dynamo"]

from unittest import mock

import torch
import torch._dynamo.test_case
from torch._dynamo import symbolic_convert
from torch._dynamo._streams.state import StreamState
from torch._dynamo.test_case import run_tests
from torch._dynamo.variables.base import Method
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import CUDADeviceVariable
from torch._dynamo.variables.streams import StreamVariable
from torch.testing._internal.accelerator_stand_in import accelerator, stream


class TestStreamContexts(torch._dynamo.test_case.TestCase):
    """In these programs, the methods of a stream stand for other things: synchronize()
    notes what is current while it is traced, and query() sets the stream."""

    def setUp(self):
        super().setUp()
        self.device = 0
        self.entered = []  # streams that are current now, outside of graphs
        self.seen = []  # the same, where the graph breaks
        self.traced = []  # (device, stream) of each synchronize()
        self.x, self.side, self.far = torch.ones(2), stream(8), stream(9, 1)
        exchange = staticmethod(self.exchange_device)
        notes = {"synchronize": Method(self.note), "query": Method(self.set_stream)}
        for owner, name, value in (
            (CUDADeviceVariable, "_exchange_fn", exchange),
            (CUDADeviceVariable, "_maybe_exchange_fn", exchange),
            (CUDADeviceVariable, "_get_device_index_fn", lambda index, **_: index),
            (torch.cuda.StreamContext, "__enter__", lambda c: self.enter(c.stream)),
            (torch.cuda.StreamContext, "__exit__", lambda c, *_: self.leave()),
            # The state that frames have where streams are traced.
            (symbolic_convert, "SymbolicStreamState", StreamState),
        ):
            self.enterContext(mock.patch.object(owner, name, value))
        self.enterContext(mock.patch.dict(StreamVariable.tp_methods, notes))
        self.enterContext(
            accelerator(lambda device=None: stream(7, self.device), lambda: self.device)
        )

        @torch._dynamo.disable
        def break_graph():
            self.seen.append(list(self.entered))

        self.break_graph = break_graph

    def exchange_device(self, index):
        before, self.device = self.device, index
        return before

    def enter(self, entered):
        self.entered.append(entered.stream_id)

    def leave(self):
        self.entered.pop()

    def note(self, variable, tx, args, kwargs):
        current = tx.symbolic_stream_state.current(tx)
        self.traced.append((self.device, current.value.stream_id))
        return ConstantVariable.create(None)

    def set_stream(self, variable, tx, args, kwargs):
        tx.symbolic_stream_state.set_stream(tx, variable)
        return ConstantVariable.create(None)

    def run_traced(self, function, fullgraph=True):
        def backend(gm, inputs):
            gm.graph.eliminate_dead_code()
            gm.recompile()
            return gm

        compiled = torch.compile(function, backend=backend, fullgraph=fullgraph)
        result = compiled(self.x, self.side, self.far)
        self.assertEqual((self.device, self.entered), (0, []))
        return result

    def test_context_of_the_current_device(self):
        def f(x, side, far):
            with torch.cuda.stream(side):
                side.synchronize()
                x = x + 1
            side.synchronize()
            return x

        self.run_traced(f)
        self.assertEqual(self.traced, [(0, 8), (0, 7)])

    def test_device_of_the_stream_is_current_in_the_context(self):
        def f(x, side, far):
            with torch.cuda.stream(far):
                far.synchronize()
                with torch.cuda.stream(side):
                    side.synchronize()
                far.synchronize()
            far.synchronize()
            return x + 1

        self.run_traced(f)
        self.assertEqual(self.traced, [(1, 9), (0, 8), (1, 9), (0, 7)])

    def test_device_of_a_block_inside_of_its_own(self):
        def f(x, side, far):
            with far:
                with far:
                    far.synchronize()
                far.synchronize()
            far.synchronize()
            return x + 1

        self.run_traced(f)
        self.assertEqual(self.traced, [(1, 9), (1, 9), (0, 7)])

    def test_set_stream_holds_until_the_context_ends(self):
        other = stream(11)

        def f(x, side, far):
            with torch.cuda.stream(side):
                other.query()
                with torch.cuda.stream(side):
                    side.synchronize()
                side.synchronize()
            side.synchronize()
            return x + 1

        self.run_traced(f)
        self.assertEqual(self.traced, [(0, 8), (0, 11), (0, 7)])

    def test_graph_break_enters_the_stream_that_was_set(self):
        other = stream(11)

        def f(x, side, far):
            with torch.cuda.stream(side):
                x = x + 1
                other.query()
                self.break_graph()
                side.synchronize()
                x = x * 2
            return x

        result = self.run_traced(f, fullgraph=False)
        self.assertEqual(result, (self.x + 1) * 2)
        self.assertEqual(self.seen, [[11]])
        self.assertEqual(self.traced, [(0, 11)])

    def test_graph_break_on_another_device(self):
        def f(x, side, far):
            with torch.cuda.stream(far):
                x = x + 1
                self.break_graph()
                x = x * 2
            side.synchronize()
            return x

        result = self.run_traced(f, fullgraph=False)
        self.assertEqual(result, (self.x + 1) * 2)
        self.assertEqual(self.seen, [[9]])
        self.assertEqual(self.traced[-1], (0, 7))


if __name__ == "__main__":
    run_tests()
