"""`_inductor.streams.region_definition` and `plan_log`: what code declares, and who hears of plans."""

from types import SimpleNamespace
from unittest import mock

import torch
from torch._inductor import config
from torch._inductor.utils import IndentedBuffer
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._inductor.streams import plan_log, runtime
from torch_overlay._inductor.streams.plan import Plan
from torch_overlay._inductor.streams.region_definition import (
    declare_runtime,
    define_region,
    record_stream_text,
    root_of,
)


class TestDefinition(TestCase):
    def setUp(self):
        super().setUp()
        self.root = SimpleNamespace(header=IndentedBuffer(), imports=IndentedBuffer())

    def defined(self, **fields):
        """The region of the module, as its statements define it."""
        declare_runtime(self.root)
        define_region(self.root, "_region0", **fields)
        names = {}
        exec(self.root.imports.getvalue(), names)
        self.assertIs(names["set_stream"], runtime.set_stream)
        exec(self.root.header.getvalue(), names)
        return names["_region0"].spec

    def test_all_fields(self):
        fields = {
            "device": 1,
            "streams": {f"stream{i}": i for i in range(1, 12)} | {"stream0": "cuda:1"},
            "events": 3,
            "entry": tuple(("wait", f"ev{i}", "stream0") for i in range(3)),
            "exit": (("record", "ev0", "stream1"),),
            "returns": ("stream1_raw",),
            "objects": {"event5": 5},
            "distinct": ("stream0", "stream1"),
            "waits_again": ("event5",),
            "records_again": (("event5", "stream1"),),
            "idle_streams": ("stream1",),
        }
        spec = self.defined(**fields)
        self.assertEqual({name: getattr(spec, name) for name in fields}, fields)
        self.assertEqual(list(spec.streams), list(fields["streams"]))  # as they came

    def test_fields_that_are_empty(self):
        empty = {"events": 0, "entry": (), "objects": {}, "idle_streams": None}
        spec = self.defined(device=None, streams={}, **empty)
        self.assertIsNone(spec.device)
        self.assertIsNone(spec.idle_streams)
        self.assertExpectedInline(
            self.root.header.getvalue(),
            """\
_region0 = region(
    device=None,
    streams={},
)
""",
        )

    def test_idle_streams_that_nobody_else_sees(self):
        """None of them has to be asked, which is not to have none."""
        self.assertEqual(self.defined(device=0, streams={}, idle_streams=()).idle_streams, ())

    def test_runtime_is_imported_once(self):
        for _ in range(2):
            declare_runtime(self.root)
        self.assertEqual(len(self.root.imports.getvalue().splitlines()), 1)

    def test_outermost_wrapper(self):
        wrapper = self.root
        for _ in range(2):
            wrapper = SimpleNamespace(parent_wrapper=wrapper)
        self.assertIs(root_of(wrapper), self.root)
        self.assertIs(root_of(self.root), self.root)


class TestRecordStream(TestCase):
    def recorded(self, cudagraphs, capturing):
        with config.patch({"triton.cudagraphs": cudagraphs}):
            graph = mock.Mock(**{"try_get_buffer.return_value": None})
            with V.set_graph_handler(graph):
                text = record_stream_text("buf0", "stream1")
        tensor = mock.Mock()
        capture = mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        with capture:
            exec(text, {"torch": torch, "buf0": tensor, "stream1": "a stream"})
        return tensor.record_stream.mock_calls == [mock.call("a stream")]

    def test_capture(self):
        self.assertTrue(self.recorded(cudagraphs=True, capturing=False))
        self.assertFalse(self.recorded(cudagraphs=True, capturing=True))
        self.assertTrue(self.recorded(cudagraphs=False, capturing=False))


class TestPlanLog(TestCase):
    def test_observers(self):
        first, second, plan = [], [], Plan(())
        end_first = plan_log.subscribe(first.append)
        end_second = plan_log.subscribe(lambda plan: (second.append(plan), end_second()))
        plan_log.publish(plan)
        plan_log.publish(plan)
        end_first()
        plan_log.publish(plan)
        self.assertEqual((len(first), len(second)), (2, 1))
        self.assertIs(first[0], plan)
