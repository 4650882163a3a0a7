"""`_dynamo.closures`: streams in cells, defaults and objects of a function that Dynamo inlines."""

import gc
import weakref
from types import SimpleNamespace

import torch
from torch._dynamo.test_case import TestCase

import form  # noqa: F401
from stand_ins.accelerator import accelerator, stream, take_operations


class TestStreamClosures(TestCase):
    def setUp(self):
        super().setUp()
        current = stream(5)
        self.enterContext(accelerator(lambda device=None: current))

    def assert_on_a_stream(self, function):
        """Compile and call without graph breaks; the one operation is on a stream."""
        found = []

        def backend(gm, inputs):
            found.append(take_operations(gm, with_tensors=True))
            return gm

        compiled = torch.compile(function, backend=backend, fullgraph=True)
        self.assertEqual(compiled(torch.ones(3)), torch.full((3,), 2.0))
        self.assertEqual(found, [[("add", 1)]])

    def test_stream_in_a_cell(self):
        side = stream(7)

        class Branch:
            def run(self, x):
                with torch.cuda.stream(side):
                    return x + 1

        self.assert_on_a_stream(lambda x: Branch().run(x))

    def test_stream_in_a_default_argument(self):
        held = stream(7)

        class Branch:
            def run(self, x, *, side=held):
                with torch.cuda.stream(side):
                    return x + 1

        self.assert_on_a_stream(lambda x: Branch().run(x))

    def test_stream_in_an_object_in_a_list_in_a_cell(self):
        held = [SimpleNamespace(side=stream(7))]

        class Branch:
            def __init__(self):
                self.side = held[0].side

            def run(self, x):
                with torch.cuda.stream(self.side):
                    return x + 1

        self.assert_on_a_stream(lambda x: Branch().run(x))

    def test_stream_of_a_function_in_a_cell(self):
        side = stream(7)

        def on_side(x):
            with torch.cuda.stream(side):
                return x + 1

        class Branch:
            def run(self, x):
                return on_side(x)

        self.assert_on_a_stream(lambda x: Branch().run(x))

    def test_cell_is_looked_up_at_each_call(self):
        first, second = stream(7), stream(9)
        side = first

        class Branch:
            def run(self, x):
                with torch.cuda.stream(side):
                    return x + 1, side

        def backend(gm, inputs):
            take_operations(gm)
            return gm

        compiled = torch.compile(lambda x: Branch().run(x), backend=backend, fullgraph=True)
        self.assertIs(compiled(torch.ones(3))[1], first)
        side = second
        self.assertIs(compiled(torch.ones(3))[1], second)

    def test_code_does_not_keep_the_function_alive(self):
        side = stream(7)

        class Branch:
            def __init__(self):
                self.side = side

            def run(self, x):
                with torch.cuda.stream(self.side):
                    return x + 1

        classes = [Branch]
        self.assert_on_a_stream(lambda x: classes[0]().run(x))
        init = weakref.ref(Branch.__init__)
        classes.clear()
        del Branch
        gc.collect()
        self.assertIsNone(init())


class TestSearch(TestCase):
    """What is searched for streams, and what isn't."""

    def holds(self, value):
        from torch_overlay._dynamo.closures import holds_streams

        return holds_streams(lambda: value)

    def test_objects_that_hold_streams(self):
        side, event = stream(7), torch.Event("cuda")

        class Held:
            def __init__(self):
                self.done = event

            def method(self):
                pass

        for value in (
            side,
            event,
            (0, side),
            {"a": {"b": side}},
            SimpleNamespace(done=event),
            Held().method,
            lambda: side,
            lambda x=side: x,
        ):
            self.assertTrue(self.holds(value), value)

    def test_objects_that_hold_none(self):
        for value in (None, 3, "stream", [torch.ones(3)], {}, lambda: 3, torch):
            self.assertFalse(self.holds(value), value)

    def test_circle(self):
        ring = []
        ring.append(ring)
        self.assertFalse(self.holds(ring))
        ring.append(stream(7))
        self.assertTrue(self.holds(ring))

    def test_cell_without_a_value(self):
        from torch_overlay._dynamo.closures import holds_streams

        def f():
            return later

        self.assertFalse(holds_streams(f))
        later = stream(7)
        self.assertTrue(holds_streams(f))

    def test_search_ends(self):
        looked_at = []

        class Endless:
            @property
            def __dict__(self):
                looked_at.append(self)
                return {"next": Endless()}

        self.assertFalse(self.holds(Endless()))
        self.assertLessEqual(len(looked_at), 1000)
