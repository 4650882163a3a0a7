# Owner(s): ["module: inductor"]

from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._dynamo._streams import objects
from torch._functorch._activation_offloading import runtime
from torch._functorch._streams.ids import COPY_STREAMS
from torch._inductor.cudagraph_relaunch import checks, host_memory, streams
from torch._inductor.cudagraph_relaunch.nodes import Refusal
from torch._inductor.cudagraph_relaunch.policy import RelaunchPolicy
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.streams.runtime import Spec
from torch._inductor.utils import BoxedBool
from torch.testing._internal.common_utils import run_tests, TestCase


def stream(number):
    return torch.Stream(stream_id=number, device_index=0, device_type=1)


def spec(streams, exit=(), entry=(), objects=None):
    return Spec(0, streams, 2, entry, exit, (), objects or {}, (), (), ())


JOINS = spec(
    {"stream0": "cuda:0", "stream_out": COPY_STREAMS},
    exit=[("record", "ev0", "stream_out"), ("wait", "ev0", "stream0")],
)
HANDS_BACK = spec(
    {"stream0": "cuda:0", "stream1": 1},
    exit=[("record", "ev0", "stream0"), ("wait_exit", "ev0", "stream1")],
)
TAKES_OVER = spec({"stream1": 1}, entry=[("record_entry", "ev0", "stream1")])
SEES_EVENTS = spec({"stream0": "cuda:0"}, objects={"event1": 1})


class TestAttachments(TestCase):
    def setUp(self):
        super().setUp()
        self.attached = checks.checks, host_memory.keepers, streams.exchanges
        for each in self.attached:
            self.addCleanup(each.__setitem__, slice(None), list(each))
            each.clear()
        self.made = SimpleNamespace(get=lambda number: f"the capture's {number}")

    def finish(self, **options):
        """Have code finished. Returns how much is attached then."""
        code = CompiledFxGraph.__new__(CompiledFxGraph)
        code.compiled_fn_runner = code.cudagraph_info = None
        code.disabled_cudagraphs_reason = None
        options = {
            "cudagraph_policy": RelaunchPolicy(),
            "triton.streams": True,
        } | options
        with (
            inductor_config.patch(options),
            mock.patch.object(CompiledFxGraph, "_post_compile", create=True),
        ):
            code.post_compile([], None, {"cudagraphs": BoxedBool(False)})
        return [len(each) for each in self.attached]

    def test_when_it_is_attached(self):
        self.assertEqual(self.finish(cudagraph_policy=None), [0, 0, 0])
        self.assertEqual(self.finish(**{"triton.streams": False}), [0, 0, 0])
        for _ in range(2):
            self.assertEqual(self.finish(), [1, 1, 2])

    def test_streams_of_a_call(self):
        """Index 0 is the caller's stream, whatever that is."""
        self.finish()
        event, owned = object(), objects.Owned(stream, (32,), {})
        leave = objects.enter(stream(7), stream(7), event, owned, stream(32))
        try:
            with streams.exchanged_streams(self.made):
                found = [objects.get(index) for index in range(5)]
                copies = runtime.copy_stream(COPY_STREAMS)
            self.assertEqual([objects.get(0), objects.get(3)], [stream(7), stream(32)])
        finally:
            leave()
        first, second, third = (f"the capture's {number}" for number in range(3))
        self.assertEqual(found, [first, second, event, third, third])
        self.assertEqual(copies, "the capture's 3")

    def test_code_without_streams(self):
        self.finish()
        with streams.exchanged_streams(self.made):
            self.assertIsNone(objects.current())

    def test_code_that_orders_the_callers_streams(self):
        self.finish()
        for region, is_refused in (
            (JOINS, False),
            (HANDS_BACK, True),
            (TAKES_OVER, True),
            (SEES_EVENTS, True),
        ):
            module = {"_region0": SimpleNamespace(spec=region)}
            exec("def call(args):\n    return _region0.enter()", module)
            if is_refused:
                with self.assertRaisesRegex(Refusal, "order the caller's streams"):
                    checks.check(module["call"])
            else:
                checks.check(module["call"])

    def test_memory_of_slabs(self):
        slab, other = torch.zeros(64, dtype=torch.uint8), torch.zeros(64)
        self.finish()
        kept = SimpleNamespace(nbytes=64, pinned=True, number=5)
        with mock.patch.object(runtime, "_all", {slab.data_ptr(): kept}):
            self.assertTrue(host_memory.holds(slab.data_ptr() + 63))
            self.assertFalse(host_memory.holds(other.data_ptr()))
            self.assertEqual(host_memory.identity(slab), (slab.data_ptr(), 5))
            self.assertIsNone(host_memory.identity(other))


if __name__ == "__main__":
    run_tests()
