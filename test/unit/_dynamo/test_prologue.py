"""`_dynamo.objects` and `prologue`: each call has its own table of streams and events."""

import gc
import threading
import weakref
from unittest import mock

import torch
import torch._dynamo.test_case

import form  # noqa: F401
from torch_overlay._dynamo import objects


class Event(torch.Event):
    """An event that notes for whom it is waited, and needs no GPU."""

    log: list[str] = []

    def __new__(cls, name):
        return super().__new__(cls, "cuda")

    def __init__(self, name):
        self.name = name

    def synchronize(self):
        self.log.append(self.name)


def waits_for(event, x):
    event.synchronize()
    return x + 1


def make_event(x):
    event = torch.Event("cuda")
    event.synchronize()
    return x + 1, event


@torch.library.custom_op("test_stream_object_tables::look", mutates_args=())
def look(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@look.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("test_stream_object_tables::look_again", mutates_args=())
def look_again(grad: torch.Tensor) -> torch.Tensor:
    found = [one for one in objects.current() if isinstance(one, Event)]
    Event.log += [f"backward of {one.name}" for one in found]
    return grad.clone()


@look_again.register_fake
def _(grad):
    return torch.empty_like(grad)


look.register_autograd(lambda ctx, grad: look_again(grad))


class TestStreamObjectTables(torch._dynamo.test_case.TestCase):
    def setUp(self):
        super().setUp()
        Event.log = []
        self.x = torch.zeros(2)
        self.addCleanup(objects.install, None)

    def tearDown(self):
        self.assertIsNone(objects.current())
        super().tearDown()

    def compile(self, function, before=lambda: None, tracing=lambda: None):
        """Compile the function. `before` runs in each call of its graph."""

        def backend(gm, inputs):
            tracing()

            def run(*args):
                before()
                return gm(*args)

            return run

        return torch.compile(function, backend=backend, fullgraph=True)

    def other(self):
        """Return a compiled function with an event of its own."""
        other, event = self.compile(lambda e, x: waits_for(e, x)), Event("other")
        return lambda: other(event, self.x)

    def test_call_inside_of_a_call(self):
        outer = self.compile(waits_for, self.other())
        for _ in range(2):
            outer(Event("outer"), self.x)
        self.assertEqual(Event.log, ["other", "outer"] * 2)

    def test_compilation_inside_of_a_compilation(self):
        outer = self.compile(waits_for, tracing=self.other())
        outer(Event("outer"), self.x)
        outer(Event("next"), self.x)
        self.assertEqual(Event.log, ["other", "outer", "next"])

    def test_calls_in_two_threads(self):
        barrier = threading.Barrier(2, timeout=60)
        found = {}

        def worker(name):
            compiled = self.compile(waits_for, barrier.wait)
            event = Event(name)
            event.log = found[name] = []
            try:
                for _ in range(3):
                    compiled(event, self.x)
            except BaseException:
                barrier.abort()
                raise

        threads = [threading.Thread(target=worker, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(found, {"a": ["a"] * 3, "b": ["b"] * 3})

    def test_call_that_fails(self):
        def fails():
            self.assertIn(event, objects.current())
            raise ValueError("a kernel fails")

        event = Event("outer")
        leave = objects.enter("a")
        with self.assertRaisesRegex(ValueError, "a kernel fails"):
            self.compile(waits_for, fails)(event, self.x)
        self.assertEqual(objects.current(), ("a",))
        leave()

    def made(self):
        """Let frames make events that can be told apart, and return a list of them."""
        made = []

        def build_event(args, kwargs):
            event = Event(f"event {len(made)}")
            made.append(weakref.ref(event))
            return event

        patch = mock.patch.object(torch._dynamo.utils, "build_event", build_event)
        patch.start()
        self.addCleanup(patch.stop)
        return made

    def test_made_objects_go_with_the_call(self):
        made = self.made()
        compiled = self.compile(lambda x: make_event(x)[0])
        for _ in range(3):
            compiled(self.x)
        gc.collect()
        self.assertEqual(Event.log, ["event 0", "event 1", "event 2"])
        self.assertEqual([event() for event in made], [None] * 3)

    def test_returned_object_is_that_of_the_graph(self):
        made = self.made()
        compiled = self.compile(make_event, self.other())
        events = [compiled(self.x)[1] for _ in range(2)]
        self.assertEqual([made[0](), made[1]()], events)
        self.assertEqual(Event.log, ["other", "event 0", "other", "event 1"])

    def test_backward_has_the_objects_of_its_forward(self):
        def forward(event, x):
            event.synchronize()
            return look(x)

        x = torch.zeros(2, requires_grad=True)
        compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
        results = [compiled(Event(name), x) for name in "ab"]
        self.other()()
        for result in results:
            result.sum().backward()
            self.assertIsNone(objects.current())
        self.assertEqual(Event.log, ["a", "b", "other", "backward of a", "backward of b"])
