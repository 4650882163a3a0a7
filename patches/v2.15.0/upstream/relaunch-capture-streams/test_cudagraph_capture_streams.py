# Owner(s): ["module: inductor"]

import contextlib
import importlib.util
import itertools
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch import streams
from torch._inductor.cudagraph_relaunch.streams import CALLERS, exchanged_streams
from torch.testing._internal.common_utils import run_tests, TestCase


HAS_BINDINGS = importlib.util.find_spec("cuda") and importlib.util.find_spec(
    "cuda.bindings"
)


@unittest.skipUnless(HAS_BINDINGS, "needs cuda.bindings")
class TestStreams(TestCase):
    def setUp(self):
        super().setUp()
        from cuda.bindings import driver

        self.kinds, self.code, handles = [], 0, itertools.count(0x51)
        self.devices = []

        def create(kind):
            self.kinds.append(kind)
            return self.code, next(handles)

        self.flags = driver.CUstream_flags
        for owner, name, value in (
            (driver, "cuStreamCreate", create),
            (torch.cuda, "ExternalStream", lambda at, device: (at, device)),
            (torch.cuda, "device", self.device),
        ):
            self.enterContext(mock.patch.object(owner, name, value))

    @contextlib.contextmanager
    def device(self, index):
        self.devices.append(index)
        yield

    def test_made_when_needed_and_kept(self):
        made = streams.Streams(1, False)
        self.assertEqual(made.get(2), (0x53, 1))
        self.assertEqual(
            [made.get(i) for i in range(3)], [(0x51 + i, 1) for i in range(3)]
        )
        self.assertEqual(self.devices, [1, 1, 1])

    def test_blocking(self):
        for blocking, name in ((False, "NON_BLOCKING"), (True, "DEFAULT")):
            streams.Streams(0, blocking).get(0)
            wanted = getattr(self.flags, f"CU_STREAM_{name}")
            self.assertEqual(self.kinds.pop(), wanted)

    def test_error_of_the_driver(self):
        self.code, made = 2, streams.Streams(0, False)
        with self.assertRaisesRegex(RuntimeError, "error in cuStreamCreate: 2"):
            made.get(0)
        self.assertEqual(made.made, [])

    def test_one_set_a_device_and_kind(self):
        self.addCleanup(streams.streams_of.cache_clear)
        streams.streams_of.cache_clear()
        keys = (0, False), (0, True), (1, False)
        found = [streams.streams_of(*key) for key in keys]
        self.assertEqual(len(set(map(id, found))), 3)
        self.assertIs(streams.streams_of(0, False), found[0])


class TestExchange(TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(streams, "exchanges", []))
        self.made = SimpleNamespace(get=lambda number: f"capture's {number}")

    def test_nothing_to_exchange(self):
        with exchanged_streams(self.made):
            pass

    def test_one_stream_for_one_key(self):
        """Also if two parts know the stream. The caller's is the one captured first."""
        table, other = {"s": (0, 7), "main": CALLERS}, {"copy": (-2, 1), "s": (0, 7)}
        before = dict(table), dict(other)

        def exchange_in(names):
            @contextlib.contextmanager
            def exchange(instead):
                was = dict(names)
                names.update({name: instead(key) for name, key in was.items()})
                yield
                names.update(was)

            return exchange

        streams.exchanges += [exchange_in(table), exchange_in(other)]
        with exchanged_streams(self.made):
            self.assertEqual(table, {"s": "capture's 1", "main": "capture's 0"})
            self.assertEqual(other, {"copy": "capture's 2", "s": "capture's 1"})
        self.assertEqual((table, other), before)

    def test_asked_later(self):
        asked = []

        @contextlib.contextmanager
        def exchange(instead):
            asked.append(instead)
            yield

        streams.exchanges.append(exchange)
        with exchanged_streams(self.made):
            found = [asked[0](key) for key in ("a", "b", "a", CALLERS)]
        self.assertEqual(found, [f"capture's {number}" for number in (1, 2, 1, 0)])
        with exchanged_streams(self.made):
            self.assertEqual(asked[1]("b"), "capture's 1")  # each capture begins anew

    def test_error_in_the_capture(self):
        left = []

        @contextlib.contextmanager
        def exchange(instead):
            try:
                yield
            finally:
                left.append(True)

        streams.exchanges += [exchange, exchange]
        with self.assertRaises(ZeroDivisionError), exchanged_streams(self.made):
            raise ZeroDivisionError
        self.assertEqual(left, [True, True])


if __name__ == "__main__":
    run_tests()
