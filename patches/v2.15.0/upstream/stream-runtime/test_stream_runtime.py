# Owner(s): ["module: inductor"]

from types import SimpleNamespace
from unittest import mock

import torch
from torch._dynamo._streams import objects
from torch._functorch._streams.ids import copy_out_stream
from torch._inductor.cudagraph_relaunch import csrc
from torch._inductor.streams import runtime
from torch.testing._internal.common_utils import run_tests, TestCase


class Stream:
    def __init__(self, calls, name):
        self.calls, self.name, self.cuda_stream = calls, name, f"{name}_handle"

    def record_event(self):
        return f"event of {self.name}"

    def wait_event(self, event):
        self.calls.append(f"{self.name} waits for {event}")


class Event:
    def __init__(self, calls, name):
        self.calls, self.name = calls, name

    def record(self, stream):
        self.calls.append(f"record {self.name} {stream.name}")

    def wait(self, stream):
        self.calls.append(f"wait {self.name} {stream.name}")


class RuntimeTestCase(TestCase):
    def setUp(self):
        super().setUp()
        self.calls, self.capturing = [], False
        self.current = {n: Stream(self.calls, f"current{n}") for n in (0, 1)}
        self.one, self.two = (Stream(self.calls, f"stream{n}") for n in (1, 2))
        objects.install((None, self.one, self.two, Event(self.calls, "given")))
        self.addCleanup(objects.install, None)
        self.replace(runtime, "callers_stream", self.current.__getitem__)
        self.replace(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def replace(self, owner, name, value):
        patch = mock.patch.object(owner, name, value, create=True)
        patch.start()
        self.addCleanup(patch.stop)

    def made(self):
        calls = list(self.calls)
        self.calls.clear()
        return calls


class TestStreams(RuntimeTestCase):
    def test_what_a_table_holds(self):
        made = []

        def cuda_stream(**kwargs):
            made.append(kwargs)
            return SimpleNamespace(**kwargs)

        self.replace(torch.cuda, "Stream", cuda_stream)
        self.replace(runtime, "copy_stream", lambda number: ("copies", number))
        self.replace(objects, "_stream_objects", {})
        base = torch.Stream(stream_id=7, device_index=1, device_type=1)
        owned = objects.Owned(lambda: base, (), {})
        found = [runtime.resolve(x) for x in (base, owned, base, self.one)]
        self.assertIs(found[3], self.one)
        self.assertIs(found[0], found[1])
        self.assertIs(found[0], found[2])
        wanted = {"stream_id": 7, "device_index": 1, "device_type": 1}
        self.assertEqual(made, [wanted])
        number = copy_out_stream(0)
        self.assertEqual(runtime.resolve(number), ("copies", number))

    def test_streams_are_ordered_after_one_another(self):
        runtime.align(self.one, self.two)
        first, second = "event of stream1", "event of stream2"
        wanted = [
            f"{name} waits for {event}"
            for name in ("stream1", "stream2")
            for event in (first, second)
        ]
        self.assertEqual(self.made(), wanted)
        self.capturing = True
        runtime.align(self.one, self.two)
        self.assertEqual(self.made(), [])

    def test_current_device_stays(self):
        devices = []
        self.replace(torch._C, "_cuda_getDevice", lambda: 0)
        self.replace(torch._C, "_cuda_setDevice", devices.append)
        self.replace(runtime, "set_stream", devices.append)
        here, there = (SimpleNamespace(device_index=n) for n in (0, 1))
        runtime.restore_stream(here)
        runtime.restore_stream(there)
        self.assertEqual(devices, [here, there, 0])

    def test_aligned_copies(self):
        on = []

        class On:
            def __init__(self, stream):
                on.append(stream)

            def __enter__(self):
                pass

            def __exit__(self, *args):
                pass

        self.replace(torch.cuda, "stream", On)
        values = torch.arange(8.0)
        self.assertIs(runtime.aligned(values, self.one), values)
        self.assertEqual(on, [])
        part = values[1:]
        copy = runtime.aligned(part, self.one)
        self.assertEqual(copy, part)
        self.assertEqual(copy.data_ptr() % runtime.ALIGNMENT, 0)
        copy += 1
        runtime.write_back(part, copy)
        self.assertEqual(values[1:], torch.arange(2.0, 9.0))
        self.assertEqual(on, [self.one, None])


class TestSeveralDevices(RuntimeTestCase):
    def setUp(self):
        super().setUp()
        self.events = 0

        def event(device):
            self.events += 1
            return Event(self.calls, f"e{self.events}")

        self.replace(torch, "Event", event)

    def region(self, **options):
        given = {
            "streams": {"stream0": "cuda:0", "there": "cuda:1", "stream1": 1},
            "events": 2,
            "entry": (("record", "ev0_3", "stream0"), ("wait", "ev0_3", "there")),
            "exit": (("record", "ev1_3", "there"), ("wait", "ev1_3", "stream1")),
            "objects": {"event3": 3},
            "returns": ("there", "stream1_raw", "ev1_3", "event3"),
        }
        return runtime.region(None, **{**given, **options})

    def test_entry_and_exit(self):
        frame, there, raw, event, given = self.region().enter()
        self.assertIs(there, self.current[1])
        self.assertEqual(
            (raw, event.name, given.name), ("stream1_handle", "e2", "given")
        )
        self.assertEqual(self.made(), ["record e1 current0", "wait e1 current1"])
        frame.leave()
        self.assertEqual(self.made(), ["record e2 current1", "wait e2 stream1"])
        self.assertEqual(frame.streams, {})

    def test_calls_that_overlap(self):
        region = self.region()
        first, second = region.enter()[0], region.enter()[0]
        self.assertIsNot(first, second)
        self.assertEqual(self.events, 4)
        first.leave()
        self.assertIs(region.enter()[0], first)

    def test_streams_that_turn_out_to_be_one(self):
        region = self.region(
            distinct=("stream0", "stream1"),
            waits_again=("event3",),
            records_again=(("event3", "stream1"),),
            entry=(),
            exit=(),
        )
        region.enter()[0].leave()
        self.assertEqual(self.made(), [])
        objects.install((None, self.current[0], None, Event(self.calls, "given")))
        frame = region.enter()[0]
        order = ["current0 waits for event of current0"] * 4
        self.assertEqual(self.made(), [*order, "wait given current0"])
        frame.leave()
        self.assertEqual(self.made(), [*order, "record given current0"])


class TestOneDevice(RuntimeTestCase):
    def setUp(self):
        super().setUp()
        self.defined = []

        def define(**options):
            self.defined.append(options)
            return SimpleNamespace(enter=lambda: (f"frame of {options['device']}",))

        module = SimpleNamespace(events=SimpleNamespace(Region=define))
        self.replace(csrc, "extension", lambda: module)

    def region(self, device=0):
        return runtime.region(
            device,
            streams={"stream0": "cuda:0", "stream2": 2},
            events=2,
            entry=(("record", "ev0", "stream0"), ("wait", "ev0", "stream2")),
            exit=(("record", "ev1", "stream2"), ("wait_exit", "ev1", "stream0")),
            returns=("stream2", "stream2_raw", "ev1", "multi_stream", "event3"),
            objects={"event3": 3},
            distinct=("stream0", "stream2"),
            idle_streams=("stream2",),
        )

    def test_definition(self):
        region = self.region()
        self.assertEqual(self.defined, [])  # until the first call
        self.assertEqual([region.enter(), region.enter()], [("frame of 0",)] * 2)
        (found,) = self.defined
        wanted = {
            "device": 0,
            "indices": (-1, 2),
            "events": 2,
            "entry": (("record", 0, 0), ("wait", 0, 1)),
            "exit": (("record", 1, 1), ("wait_exit", 1, 0)),
            "results": (
                ("stream", 1),
                ("raw", 1),
                ("event", 1),
                ("multi_stream", 0),
                ("object", 3),
            ),
            "distinct": (0, 1),
            "idle_streams": (1,),
        }
        self.assertEqual({key: found[key] for key in wanted}, wanted)
        found["aliased"](False)
        self.assertEqual(len(self.made()), 4)

    def test_region_without_idle_streams(self):
        runtime.region(0, {"stream0": "cuda:0"}).enter()
        self.assertIsNone(self.defined[0]["idle_streams"])

    def test_device_that_is_current_at_a_call(self):
        region, devices = self.region(-1), iter((0, 1, 0))
        current = devices.__next__
        self.replace(torch.accelerator, "current_device_index", current)
        found = [frame for _ in range(3) for frame in region.enter()]
        self.assertEqual(found, ["frame of 0", "frame of 1", "frame of 0"])
        self.assertEqual([options["device"] for options in self.defined], [0, 1])

    def test_module_that_can_not_be_built(self):
        error = csrc.NotBuiltError("no compiler")
        self.replace(csrc, "extension", mock.Mock(side_effect=error))
        region = self.region()
        for _ in range(2):
            with self.assertRaisesRegex(csrc.NotBuiltError, "no compiler"):
                region.enter()


if __name__ == "__main__":
    run_tests()
