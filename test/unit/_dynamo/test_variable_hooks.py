"""`_dynamo.hooks`: what is searched for streams in a function that Dynamo inlines."""

from types import SimpleNamespace

import torch
from torch._dynamo.test_case import TestCase

import form  # noqa: F401
from stand_ins.accelerator import stream


class TestSearch(TestCase):
    """What is searched for streams, and what isn't."""

    def holds(self, value):
        from torch_overlay._dynamo.hooks import holds_streams

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
        from torch_overlay._dynamo.hooks import holds_streams

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
