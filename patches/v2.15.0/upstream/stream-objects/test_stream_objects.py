# Owner(s): ["module: dynamo"]

import contextlib
import gc
import threading
import weakref
from unittest import mock

import torch
from torch._dynamo._streams import objects
from torch._dynamo._streams.objects import enter, get, Owned, put, Snapshot
from torch.testing._internal.common_utils import run_tests, TestCase


class Stream:
    """Stands for torch.cuda.Stream, which can't be made without a GPU."""

    log: list[tuple[str, str]] = []

    def __init__(self, name="", stream_id=0, device_index=0, device_type=1):
        self.name, self.stream_id = name, stream_id
        self.device_index = device_index
        self.cuda_stream = (name, stream_id)

    def wait_stream(self, other):
        self.log.append((self.name, other.name))


class Thing:
    """An object that the caller holds."""


def in_thread(function):
    """Return what the function returns in a thread of its own."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


class TestStreamObjects(TestCase):
    def setUp(self):
        super().setUp()
        Stream.log = []
        objects._stream_objects.clear()
        self.addCleanup(objects._stream_objects.clear)
        self.addCleanup(objects.install, None)

    def test_calls_nest(self):
        leave = enter("a", "b")
        leave_inner = enter("c")
        self.assertEqual(get(0), "c")
        with self.assertRaisesRegex(RuntimeError, "stream object 1 was looked up"):
            get(1)
        leave_inner()
        self.assertEqual([get(0), get(1)], ["a", "b"])
        leave()
        self.assertIsNone(objects.current())
        with self.assertRaisesRegex(RuntimeError, "outside the call"):
            get(0)

    def test_threads_have_their_own_tables(self):
        enter("a")
        self.assertIsNone(in_thread(objects.current))

        def other():
            enter("b")
            return get(0)

        self.assertEqual(in_thread(other), "b")
        self.assertEqual(get(0), "a")

    def test_nothing_is_held_after_the_call(self):
        thing = Thing()
        alive = weakref.ref(thing)
        leave = enter(thing)
        del thing
        self.assertIsNotNone(alive())
        leave()
        gc.collect()
        self.assertIsNone(alive())

    def test_owned_objects_are_made_late_and_once_a_thread(self):
        made = []

        def make(*args, **kwargs):
            made.append((args, kwargs))
            return Thing()

        owned = Owned(make, (1,), {"priority": -1})
        enter("a", owned)()
        leave = enter("a", owned)
        self.assertEqual(made, [])
        first = get(1)
        self.assertIs(get(1), first)
        leave()
        enter("b", owned)
        self.assertIs(get(1), first)
        self.assertEqual(made, [((1,), {"priority": -1})])

        def other():
            enter("c", owned)
            return get(1)

        self.assertIsNot(in_thread(other), first)
        self.assertEqual(len(made), 2)
        self.assertIs(get(1), first)

    def test_objects_that_are_replaced(self):
        given = ("a", "b")
        leave = enter(*given)
        leave_inner = enter(*given)
        put(0, "c")
        put(2, "d")
        self.assertEqual([get(i) for i in range(3)], ["c", "b", "d"])
        with self.assertRaisesRegex(RuntimeError, "4 can't be set: the table has 3"):
            put(4, "e")
        leave_inner()
        self.assertEqual([get(0), get(1)], ["a", "b"])
        leave()

    def test_snapshot_has_objects_of_this_thread(self):
        owned = Owned(Thing, (), {})
        leave = enter("a", owned)
        taken = Snapshot(objects.current())
        leave()
        self.assertEqual(taken.objects, ["a", owned.resolve()])

        def other():
            return taken.run(lambda: get(1), ())

        self.assertIs(in_thread(other), owned.resolve())

    def test_backward_has_its_table_while_it_runs(self):
        enter("a", "b")
        taken = Snapshot(objects.current())
        enter("c")
        self.assertEqual(taken.run(lambda x: (x, get(0), get(1)), (1,)), (1, "a", "b"))
        self.assertEqual(get(0), "c")

        def fails():
            self.assertEqual(get(1), "b")
            raise ValueError("a kernel fails")

        with self.assertRaisesRegex(ValueError, "a kernel fails"):
            taken.run(fails, ())
        self.assertEqual(get(0), "c")

    def test_backward_on_another_stream_is_joined_with_its_forward(self):
        forward, same, other, side = map(Stream, ("f", "f", "g", "s"))
        enter(forward, side)
        taken = Snapshot(objects.current())

        def found():
            Stream.log.append(("run", get(0).name))
            return get(0), get(1)

        def run(current, function):
            Stream.log = []
            with (
                mock.patch.object(torch.cuda, "Stream", Stream),
                mock.patch.object(objects, "callers_stream", lambda: current),
            ):
                return taken.run(function, ())

        self.assertEqual(run(same, found), (same, side))
        self.assertEqual(Stream.log, [("run", "f")])
        self.assertEqual(run(other, found), (other, side))
        self.assertEqual(Stream.log, [("g", "f"), ("run", "g"), ("f", "g")])

        def fails():
            raise ValueError("a kernel fails")

        with self.assertRaises(ValueError):
            run(other, fails)
        self.assertEqual(Stream.log, [("g", "f"), ("f", "g")])
        self.assertIs(taken.objects[0], forward)

    def test_callers_stream_is_one_object_for_each_stream(self):
        current = {0: 5, 1: 6}

        def get_current(device):
            return current[device], device, 1

        with contextlib.ExitStack() as stack:
            patch = lambda *args: stack.enter_context(mock.patch.object(*args))  # noqa: E731
            patch(torch.cuda, "Stream", Stream)
            for name, function in (
                ("Device", lambda: 1),
                ("CurrentStream", get_current),
            ):
                name = f"_cuda_get{name}"
                stack.enter_context(
                    mock.patch.object(torch._C, name, function, create=True)
                )
            first = objects.callers_stream(0)
            self.assertEqual((first.stream_id, first.device_index), (5, 0))
            self.assertIs(objects.callers_stream(0), first)
            self.assertEqual(objects.callers_stream().stream_id, 6)
            for current[0] in range(1000):
                stream = objects.callers_stream(0)
                self.assertEqual(stream.stream_id, current[0])
                self.assertLessEqual(len(objects._stream_objects), 256)

    def test_plain_stream(self):
        class Special(torch.Stream):
            pass

        stream = Special(stream_id=3, device_index=1, device_type=1)
        plain = objects.as_base(stream)
        self.assertIs(type(plain), torch.Stream)
        self.assertEqual((plain.stream_id, plain.device), (3, stream.device))


if __name__ == "__main__":
    run_tests()
