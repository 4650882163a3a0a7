"""Streams and events in Dynamo: what traces, what the graph says, and what the run sees.

The graphs are Dynamo's, node by node. `@n` is the stream that a node is placed on, by index; index 0 is the stream
that is current when the function is called. Lines that only look an object up are left out. The backend runs them as
they are, on a simulated GPU that logs what is done to streams and events.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import re
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._dynamo.test_case
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import _disable_current_modes

import form  # noqa: F401
from torch_overlay import config, frame_facts
from torch_overlay._dynamo import objects
from torch_overlay.frame_facts import ObjectInfo
from torch_overlay.testing import simulated_gpu


GLOBAL_STREAMS: dict[Any, Any] = {}
GLOBAL_EVENT: Any = None


def text(gm: torch.fx.GraphModule) -> str:
    lines = []
    for node in gm.graph.nodes:
        if node.op == "placeholder" or "get_external_object" in node.name:
            continue
        name = getattr(node.target, "__name__", str(node.target)).removesuffix(".default")
        arguments = ", ".join(map(str, node.args))
        stream = node.meta.get("custom", {}).get("stream")
        place = "" if stream is None else f" @{stream}"
        if node.op == "output":
            lines.append(f"return {', '.join(map(str, node.args[0]))}")
        else:
            lines.append(f"{node.name} = {name}({arguments}){place}")
    return "\n".join(lines)


class Graphs:
    """A backend that keeps Dynamo's graphs, and what Dynamo knew about their objects, and runs them."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.texts: list[str] = []
        self.objects: list[tuple[ObjectInfo, ...]] = []
        self.traced_at = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        if not self.texts:
            self.traced_at = len(self.log)
        self.texts.append(text(gm))
        self.objects.append(frame_facts.current().objects)
        return lambda *inputs: Run(gm).run(*inputs)

    def __str__(self) -> str:
        return "\n----\n".join(self.texts)


class Run(torch.fx.Interpreter):
    """Runs a graph on fake tensors, but operators on streams and events for real."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if str(target).startswith("streams") and not any(isinstance(one, torch.Tensor) for one in args):
            with _disable_current_modes():
                return target(*args, **kwargs)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target == "item":
            with _disable_current_modes():
                return args[0].item()
        return super().call_method(target, args, kwargs)


class StreamTestCase(torch._dynamo.test_case.TestCase):
    devices = 1

    def setUp(self) -> None:
        super().setUp()
        self.gpu = self.enterContext(simulated_gpu(self.devices))
        self.log = self.gpu.device_log
        self.x = torch.empty(8, device="cuda")
        self.s, self.s2, self.event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
        counters.clear()

    def tearDown(self) -> None:
        self.assertIsNone(objects.current(), "a table of stream objects was left")
        objects.install(None)
        super().tearDown()

    def compile(self, fn: Callable[..., Any], fullgraph: bool = True) -> tuple[Callable[..., Any], Graphs]:
        graphs = Graphs(self.log)
        return torch.compile(fn, backend=graphs, fullgraph=fullgraph), graphs

    def trace(self, fn: Callable[..., Any], *args: Any, fullgraph: bool = True) -> tuple[Any, Graphs]:
        """Compiles and calls; tracing the first graph must not have touched a stream, an event or the device."""
        compiled, graphs = self.compile(fn, fullgraph)
        before = len(self.log)
        result = compiled(*args)
        self.assertEqual(self.log[before : graphs.traced_at], [])
        return result, graphs

    def expect(self, traced: Any, text: str, fullgraph: bool = True) -> None:
        """The graphs, or those of a function of the fields that its parameters name."""
        if not isinstance(traced, (Graphs, str)):
            given = [getattr(self, name) for name in inspect.signature(traced).parameters]
            traced = self.trace(traced, *given, fullgraph=fullgraph)[1]
        self.assertEqual(str(traced).replace("\n", "; "), text)

    def during(self, fn: Callable[..., object], *args: Any) -> list[str]:
        """What the call does to streams and events."""
        before = len(self.log)
        fn(*args)
        return self.log[before:]


def looker() -> tuple[Callable[[], None], list[Any]]:
    """A function that breaks the graph, and the streams that it found current."""
    seen: list[Any] = []
    return torch._dynamo.disable(lambda: seen.append(torch.cuda.current_stream())), seen


def graph(*texts: str) -> Callable[..., Any]:
    """A test of a function's graph, which is written in the place of the test. With several texts it is broken."""
    return lambda fn: lambda self: self.expect(fn, "; ----; ".join(texts), fullgraph=len(texts) == 1)


class TestContexts(StreamTestCase):
    @graph("add = add(l_x_, 1); mul = mul(add, 2) @1; sub = sub(mul, 3); return sub")
    def test_with_stream_places_the_block(x, s):
        y = x + 1
        with s:
            y = y * 2
        return y - 3

    @graph("mul = mul(l_x_, 2) @1; sub = sub(mul, 3) @2; return sub")
    def test_stream_context_function_and_class(x, s, s2):
        with torch.cuda.stream(s):
            y = x * 2
        with torch.cuda.StreamContext(s2):
            return y - 3

    @graph("add = add(l_x_, 1); mul = mul(add, 2) @1; return mul")
    def test_stream_none_does_nothing(x, s):
        with torch.cuda.stream(None):
            y = x + 1
        with s, torch.cuda.StreamContext(None):
            return y * 2

    @graph(
        "add = add(l_x_, 1) @1; mul = mul(add, 2) @2; sub = sub(mul, 3) @1; truediv = truediv(sub, 4); return truediv"
    )
    def test_stream_entered_inside_its_own_block(x, s, s2):
        with s:
            with s2:
                with s:
                    y = x + 1
                y = y * 2
            y = y - 3
        return y / 4

    def test_entering_the_current_stream_is_index_0(self) -> None:
        def fn(x):
            with torch.cuda.stream(torch.cuda.current_stream()):
                return x + 1

        _, graphs = self.trace(fn, self.x)
        self.expect(graphs, "add = add(l_x_, 1) @0; return add")
        self.assertEqual([info.index for info in graphs.objects[0]], [0])

    @graph("add = add(l_x_, 1) @1; synchronize_stream = synchronize_stream(1); return add")
    def test_with_stream_as_gives_the_stream(x, s):
        with s as inner:
            y = x + 1
        inner.synchronize()
        return y

    def test_context_made_before_the_function(self) -> None:
        context = torch.cuda.stream(self.s)

        def fn(x):
            with context:
                return x + 1

        self.expect(fn, "add = add(l_x_, 1) @1; return add")

    @graph("add = add(l_x_, 1) @1; mul = mul(add, 2); sub = sub(mul, 3) @1; return sub")
    def test_context_used_twice(x, s):
        context = torch.cuda.stream(s)
        with context:
            y = x + 1
        y = y * 2
        with context:
            return y - 3

    @graph("add = add(l_x_, 1); mul = mul(add, 2) @1; sub = sub(mul, 3); return sub")
    def test_context_in_an_inlined_function(x, s):
        def side(y):
            with torch.cuda.stream(s):
                return y * 2

        return side(x + 1) - 3

    @graph("add = add(l_x_, 1) @1; mul = mul(add, 2); return mul")
    def test_exception_in_the_block_leaves_it(x, s):
        try:
            with s:
                y = x + 1
                raise ValueError
        except ValueError:
            return y * 2

    def test_annotations_end_with_the_frame(self) -> None:
        s = self.s

        def fails(x):
            with s:
                torch.cuda.set_stream(self.s2)
                y = x + 1
                torch._dynamo.graph_break()
                return y

        def plain(x):
            return x + 1

        with self.assertRaises(torch._dynamo.exc.Unsupported):
            self.trace(fails, self.x)
        self.expect(str(self.trace(plain, self.x)[1]), "add = add(l_x_, 1); return add")


class TestCurrentStream(StreamTestCase):
    def test_default_stream(self) -> None:
        def fn(x, s):
            default = torch.cuda.default_stream()
            s.wait_stream(default)
            with s:
                y = x + 1
            torch.cuda.default_stream().wait_stream(s)
            return y, default

        (_, default), graphs = self.trace(fn, self.x, self.s)
        self.expect(
            graphs,
            "wait_stream = wait_stream(1, 0); add = add(l_x_, 1) @1; wait_stream_1 = wait_stream(0, 1); return add",
        )
        self.assertEqual(default, torch.cuda.default_stream())

    def test_current_stream_follows_contexts(self) -> None:
        def fn(x, s):
            before = torch.cuda.current_stream()
            with s:
                inside = torch.cuda.current_stream()
            after = torch.cuda.current_stream()
            return x + 1, before, inside, after

        (_, before, inside, after), _ = self.trace(fn, self.x, self.s)
        self.assertEqual((before, inside, after), (torch.cuda.default_stream(), self.s, torch.cuda.default_stream()))
        self.assertIs(type(before), torch.cuda.Stream)

    def test_accelerator_current_stream_has_the_plain_type(self) -> None:
        def fn(x):
            return x + 1, torch.accelerator.current_stream(), torch.cuda.current_stream()

        (_, plain, cuda), _ = self.trace(fn, self.x)
        self.assertIs(type(plain), torch.Stream)
        self.assertEqual(plain, torch.accelerator.current_stream())
        self.assertEqual(cuda, torch.cuda.current_stream())

    def test_index_0_is_the_stream_of_the_call(self) -> None:
        """The caller's current stream may differ at each call; the code is compiled once."""
        event = torch.cuda.Event()

        def fn(x):
            event.record()
            return x + 1, torch.cuda.current_stream()

        compiled, graphs = self.compile(fn)
        compiled(self.x)
        for stream in (self.s, self.s2):
            with stream:
                before = len(self.log)
                self.assertEqual(compiled(self.x)[1], stream)
                log = self.log[before:]
            self.assertEqual(
                [line.split(" on ")[-1] for line in log if "record" in line], [f"stream {stream.stream_id}"]
            )
        self.assertEqual(len(graphs.texts), 1)

    def test_comparison_with_the_current_stream_is_guarded(self) -> None:
        def fn(x, s):
            cur = torch.cuda.current_stream()
            return x + 1, cur == s, cur == torch.cuda.default_stream(), cur != s

        compiled, graphs = self.compile(fn)
        self.assertEqual(compiled(self.x, self.s)[1:], fn(self.x, self.s)[1:])
        compiled(self.x, self.s2)
        self.assertEqual(len(graphs.texts), 1, "another stream that is not current either needs no new code")
        for current in (self.s, self.s2, torch.cuda.default_stream()):
            with torch.cuda.stream(current):
                self.assertEqual(compiled(self.x, self.s)[1:], fn(self.x, self.s)[1:])

    def test_handle_of_the_current_stream_is_that_of_the_call(self) -> None:
        """pytorch#173172, #180179: the id, or the handle at compile time, in place of the handle."""

        def fn(x):
            inner = torch.cuda.current_stream().cuda_stream
            with self.s2:
                return x + 1, inner, torch.cuda.current_stream().cuda_stream

        compiled, _ = self.compile(fn)
        for current in (torch.cuda.default_stream(), self.s, self.s2):
            with torch.cuda.stream(current):
                self.assertEqual(compiled(self.x)[1:], (current.cuda_stream, self.s2.cuda_stream))

    def test_set_stream_places_what_follows_and_lasts(self) -> None:
        def fn(x, s, s2):
            y = x + 1
            torch.cuda.set_stream(s)
            y = y * 2
            with s2:
                y = y - 3
            y = y / 4
            return y, torch.cuda.current_stream()

        (_, current), graphs = self.trace(fn, self.x, self.s, self.s2)
        self.expect(
            graphs,
            "add = add(l_x_, 1); mul = mul(add, 2) @1; sub = sub(mul, 3) @2; truediv = truediv(sub, 4) @1; "
            "return truediv",
        )
        self.assertEqual(current, self.s)
        self.assertEqual(torch.cuda.current_stream(), self.s)

    def test_set_stream_in_a_context_ends_with_it(self) -> None:
        def fn(x, s, s2):
            with s:
                torch.accelerator.set_stream(s2)
                y = x + 1
            return y * 2

        self.expect(self.trace(fn, self.x, self.s, self.s2)[1], "add = add(l_x_, 1) @2; mul = mul(add, 2); return mul")
        self.assertEqual(torch.cuda.current_stream(), torch.cuda.default_stream())

    def test_set_stream_in_an_inlined_function_lasts(self) -> None:
        def use(stream):
            torch.cuda.set_stream(stream)

        def fn(x, s):
            use(s)
            return x + 1

        self.expect(self.trace(fn, self.x, self.s)[1], "add = add(l_x_, 1) @1; return add")
        self.assertEqual(torch.cuda.current_stream(), self.s)

    def test_set_stream_back_leaves_the_caller_where_it_was(self) -> None:
        def fn(x, s):
            before = torch.cuda.current_stream()
            torch.cuda.set_stream(s)
            y = x + 1
            torch.cuda.set_stream(before)
            return y * 2

        with self.s2:
            _, graphs = self.trace(fn, self.x, self.s)
            self.assertEqual(torch.cuda.current_stream(), self.s2)
        self.expect(graphs, "add = add(l_x_, 1) @1; mul = mul(add, 2) @0; return mul")

    def test_set_stream_without_other_work(self) -> None:
        def fn(x, s):
            torch.cuda.set_stream(s)
            return x

        self.trace(fn, self.x, self.s)
        self.assertEqual(torch.cuda.current_stream(), self.s)

    @graph("add = add(l_x_, 1); return add")
    def test_set_stream_none(x):
        torch.cuda.set_stream(None)
        return x + 1


class TestSyncs(StreamTestCase):
    @graph("wait_stream = wait_stream(1, 0); add = add(l_x_, 1) @1; wait_stream_1 = wait_stream(0, 1); return add")
    def test_fork_and_join_by_wait_stream(x, s):
        s.wait_stream(torch.cuda.current_stream())
        with s:
            y = x + 1
        torch.cuda.current_stream().wait_stream(stream=s)
        return y

    @graph(
        "record_event = record_event(1, 0); wait_event = wait_event(1, 2); add = add(l_x_, 1) @2; "
        "record_event_1 = record_event(1, 2) @2; wait_event_1 = wait_event(1, 0); "
        "record_event_2 = record_event(1, 2); wait_event_2 = wait_event(1, 2); "
        "synchronize_event = synchronize_event(1); synchronize_stream = synchronize_stream(2); return add"
    )
    def test_event_methods(x, s, event):
        event.record()
        event.wait(s)
        with s:
            y = x + 1
            event.record(stream=None)
        event.wait()
        event.record(stream=s)
        s.wait_event(event)
        event.synchronize()
        s.synchronize()
        return y

    def test_record_event_makes_an_event_and_records_nothing_while_tracing(self) -> None:
        def fn(x, s):
            with s:
                y = x + 1
                done = s.record_event()
            done.wait()
            return y, done

        (_, done), graphs = self.trace(fn, self.x, self.s)
        self.expect(
            graphs,
            "add = add(l_x_, 1) @1; record_event = record_event(2, 1) @1; wait_event = wait_event(2, 0); return add",
        )
        self.assertIs(type(done), torch.cuda.Event)

    def test_record_event_with_an_event(self) -> None:
        s = self.s

        def fn(x, event):
            same = s.record_event(event)
            s.record_event(event=same)
            return x + 1, same

        event = torch.cuda.Event()
        (_, same), graphs = self.trace(fn, self.x, event)
        self.expect(
            graphs,
            "record_event = record_event(2, 1); record_event_1 = record_event(2, 1); add = add(l_x_, 1); return add",
        )
        self.assertIs(same, event)

    @graph(
        "add_ = add_(l_x_, 1) @1; record_event = record_event(2, 1) @1; wait_event = wait_event(2, 0); "
        "mul = mul(l_x_, 2); return mul"
    )
    def test_event_recorded_after_an_input_mutation(x, s):
        """Upstream refuses (pytorch#195573). The order of the write-back is the lower layers' business."""
        with s:
            x.add_(1)
            done = s.record_event()
        done.wait()
        return x * 2

    @graph(
        "add = add(l_x_, 1); synchronize_device = synchronize_device(cuda, None); "
        "synchronize_device_1 = synchronize_device(cuda, 0); synchronize_device_2 = synchronize_device(cuda, 0); "
        "synchronize_device_3 = synchronize_device(cuda, None); return add"
    )
    def test_synchronize_functions(x):
        y = x + 1
        torch.cuda.synchronize()
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(device="cuda:0")
        torch.accelerator.synchronize()
        return y

    @graph(
        "add = add(l_x_, 1); record_stream = record_stream(add, 1); record_stream_1 = record_stream(add, 0); return add"
    )
    def test_record_stream(x, s):
        y = x + 1
        y.record_stream(s)
        y.record_stream(torch.cuda.current_stream())
        return y

    @graph("add = add(l_x_, 1) @1; mul = mul(add, 2); return mul")
    def test_deleting_a_tensor_of_two_streams_adds_no_sync(x, s):
        with s:
            y = x + 1
        z = y * 2
        del y
        return z

    def test_wrong_argument_is_refused(self) -> None:
        def fn(x, s):
            s.wait_stream(3)
            return x

        with self.assertRaisesRegex(torch._dynamo.exc.Unsupported, "wait_stream takes a stream"):
            self.trace(fn, self.x, self.s)

    def test_method_without_a_trace_says_so(self) -> None:
        def fn(x, event):
            return x, event.ipc_handle()

        with self.assertRaisesRegex(torch._dynamo.exc.Unsupported, "ipc_handle"):
            self.trace(fn, self.x, torch.cuda.Event())


class TestRunTimeValues(StreamTestCase):
    def text_of(self, fn: Callable[..., Any], *args: Any, fullgraph: bool = True) -> str:
        self.result, graphs = self.trace(fn, *args, fullgraph=fullgraph)
        return str(graphs)

    def recorded(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @graph(
        "add = add(l_x_, 1); query_stream_default = query_stream(1); item = item(query_stream_default); "
        "ne = ne(item, 0); query_event_default = query_event(2); item_1 = item(query_event_default); "
        "ne_1 = ne(item_1, 0); return add, ne, ne_1"
    )
    def test_query_comes_from_the_run(x, s, event):
        return x + 1, s.query(), event.query()

    @graph(
        "record_event = record_event(1, 0); add = add(l_x_, 1); record_event_1 = record_event(2, 0); "
        "synchronize_event = synchronize_event(2); elapsed_time_default = elapsed_time(1, 2); "
        "return add, elapsed_time_default"
    )
    def test_elapsed_time_comes_from_the_run(x):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(True)
        start.record()
        y = x + 1
        end.record()
        end.synchronize()
        return y, start.elapsed_time(end_event=end)

    def test_elapsed_time_is_a_number_one_can_compute_with(self) -> None:
        def fn(x, start, end):
            return x * (start.elapsed_time(end) / 1000)

        self.expect(
            self.text_of(fn, self.x, self.recorded(), self.recorded()),
            "elapsed_time_default = elapsed_time(1, 2); item = item(elapsed_time_default); "
            "truediv = truediv(item, 1000); mul = mul(l_x_, truediv); return mul",
        )

    @graph(
        "query_stream_default = query_stream(1); add = add(l_x_, 1); item = item(query_stream_default); "
        "ne = ne(item, 0); query_stream_default_1 = query_stream(1); item_1 = item(query_stream_default_1); "
        "ne_1 = ne(item_1, 0); return add, ne, ne_1"
    )
    def test_query_twice_asks_twice(x, s):
        first = s.query()
        return x + 1, first, s.query()

    def test_query_without_fullgraph_stays_in_the_graph(self) -> None:
        def fn(x, s):
            return x + 1, s.query()

        self.assertEqual(self.text_of(fn, self.x, self.s, fullgraph=False).count("----"), 0)
        self.assertEqual(dict(counters["graph_break"]), {})

    @graph(
        "add = add(l_x_, 1); query_stream_default = query_stream(1); item = item(query_stream_default); "
        "ne = ne(item, 0); return ne, add",
        "mul = mul(l_y_, 2); return mul",
    )
    def test_branch_on_query_breaks_the_graph(x, s):
        y = x + 1
        if s.query():
            return y * 2
        return y - 3

    def test_branch_on_query_under_fullgraph_is_an_error_that_names_the_line(self) -> None:
        def fn(x, s):
            if s.query():
                return x + 1
            return x

        text = (
            "(?s)branch on whether a stream is done.*only known when the code runs.*Leave out fullgraph.*`synchronize"
        )
        with self.assertRaisesRegex(torch._dynamo.exc.UserError, text + ".*if s.query"):
            self.text_of(fn, self.x, self.s)

    def test_loop_until_an_event_under_fullgraph_is_an_error_that_says_so(self) -> None:
        def fn(x, event):
            while not event.query():
                x = x + 1
            return x

        with self.assertRaisesRegex(torch._dynamo.exc.UserError, "whether an event has happened"):
            self.text_of(fn, self.x, torch.cuda.Event())

    def test_branch_on_a_number_of_the_users_own_keeps_its_error(self) -> None:
        def fn(x, s, n):
            torch._check(n.item() > 3)
            if n.item() > 5:
                return x
            with s:
                return x + 1

        with torch._dynamo.config.patch(capture_scalar_outputs=True), self.assertRaisesRegex(Exception, "u0 > 5"):
            self.text_of(fn, self.x, self.s, torch.tensor(7))

    def test_capture_comes_from_the_run(self) -> None:
        """A side stream may join the capture of the caller's later than in eager, so both are asked."""

        def fn(x, s):
            with s:
                inside = torch.cuda.is_current_stream_capturing()
                y = x + 1
            return y, torch.cuda.is_current_stream_capturing(), inside

        compiled, graphs = self.compile(fn)
        self.assertEqual(compiled(self.x, self.s)[1:], (False, False))
        self.expect(
            graphs,
            "is_capturing_default = is_capturing(1, 0) @1; add = add(l_x_, 1) @1; "
            "item = item(is_capturing_default) @1; ne = ne(item, 0) @1; is_capturing_default_1 = is_capturing(0, 0); "
            "item_1 = item(is_capturing_default_1); ne_1 = ne(item_1, 0); return add, ne_1, ne",
        )
        with mock.patch("torch.cuda.graphs._cuda_isCurrentStreamCapturing", lambda: True):
            self.assertEqual(compiled(self.x, self.s)[1:], (True, True))

    def test_branch_on_capture_breaks_the_graph_or_is_an_error(self) -> None:
        def fn(x, s):
            with s:
                y = x + 1
            return y if torch.cuda.is_current_stream_capturing() else y * 2

        self.assertEqual(self.text_of(fn, self.x, self.s, fullgraph=False).count("----"), 1)
        torch._dynamo.reset()
        with self.assertRaisesRegex(torch._dynamo.exc.UserError, "whether a CUDA graph is being captured"):
            self.text_of(fn, self.x, self.s)

    def test_raw_handle_is_that_of_the_current_stream(self) -> None:
        def fn(x, s):
            with s:
                inside = torch._C._cuda_getCurrentRawStream(0)
            return x + 1, inside == s.cuda_stream, inside, torch._C._cuda_getCurrentRawStream(x.device.index)

        self.text_of(fn, self.x, self.s)
        self.assertEqual(self.result[1:], (True, self.s.cuda_stream, 0))

    def test_device_of_an_event_is_that_of_its_first_record(self) -> None:
        def fn(x, event, s):
            before = event.device
            event.record(s)
            own = torch.cuda.Event()
            unrecorded = own.device
            own.record()
            return x + 1, before, event.device, unrecorded, own.device

        device = torch.device("cuda:0")
        compiled, graphs = self.compile(fn)
        self.assertEqual(compiled(self.x, torch.cuda.Event(), self.s)[1:], (None, device, None, device))
        self.assertEqual(compiled(self.x, self.recorded(), self.s)[1:], (device, device, None, device))
        self.assertEqual(len(graphs.texts), 2)

    def test_text_of_a_stream_needs_no_guard(self) -> None:
        def fn(x, s):
            return x + 1, f"on {s}", str(s), f"{s!r:>60}", repr(torch.cuda.current_stream())

        compiled, graphs = self.compile(fn)
        for s in (self.s, self.s2):
            with s:
                self.assertEqual(compiled(self.x, s)[1:], fn(self.x, s)[1:])
        self.assertEqual(len(graphs.texts), 1)

    @graph(
        "add = add(l_x_, 1); stream_handle_default = stream_handle(1); item = item(stream_handle_default); "
        "stream_id_default = stream_id(1); item_1 = item(stream_id_default); return add, item, item_1"
    )
    def test_handle_of_a_stream_of_the_frame_comes_from_the_run(x):
        s = torch.cuda.Stream()
        return x + 1, s.cuda_stream, s.stream_id

    @graph(
        "add = add(l_x_, 1); same_stream_default = same_stream(1, 2); item = item(same_stream_default); "
        "ne = ne(item, 0); same_stream_default_1 = same_stream(1, 2); item_1 = item(same_stream_default_1); "
        "ne_1 = ne(item_1, 0); sym_not = sym_not(ne_1); return add, ne, sym_not"
    )
    def test_comparison_of_a_stream_of_the_frame_comes_from_the_run(x, s):
        """After 32 streams of a device PyTorch hands out the first one again."""
        own = torch.cuda.Stream()
        return x + 1, own == s, own != s, own == own

    def test_users_own_item_still_breaks_the_graph(self) -> None:
        """Asking for a run-time value of ours does not make Dynamo capture Tensor.item() as well."""

        def fn(x, s, scale):
            done = s.query()
            return x * scale.item(), done

        with contextlib.suppress(Exception):  # a fake tensor has no item
            self.text_of(fn, self.x, self.s, torch.ones(()), fullgraph=False)
        self.assertIn("Tensor.item()", str(counters["graph_break"]))

    def test_size_that_depends_on_data_breaks_the_graph_as_on_stock(self) -> None:
        """The hint names the setting, which traces it, as fullgraph=True does."""

        def fn(x, s):
            y = x + 1
            with s:
                return y.nonzero() * 2

        with contextlib.suppress(Exception):  # a fake tensor has no such size
            self.text_of(fn, self.x, self.s, fullgraph=False)
        (reason,) = counters["graph_break"]
        self.assertIn("`torch._dynamo.config.capture_dynamic_output_shape_ops = True`", reason)
        traced = "add = add(l_x_, 1)\nnonzero = nonzero(add) @1\n"
        for fullgraph, setting in ((True, False), (False, True)):
            torch._dynamo.reset()
            counters.clear()
            with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=setting):
                self.assertIn(traced, self.text_of(fn, self.x, self.s, fullgraph=fullgraph))
            self.assertEqual(dict(counters["graph_break"]), {})


class TestObjects(StreamTestCase):
    def test_objects_in_containers_globals_and_modules(self) -> None:
        global GLOBAL_EVENT
        GLOBAL_STREAMS["a"], GLOBAL_EVENT = self.s, torch.cuda.Event()
        self.addCleanup(GLOBAL_STREAMS.clear)

        class Module(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.stream = torch.cuda.Stream()
                self.events = [torch.cuda.Event()]

            def forward(self, x):
                with self.stream:
                    y = x + 1
                    self.events[0].record()
                with GLOBAL_STREAMS["a"]:
                    self.events[0].wait()
                    y = y * 2
                    GLOBAL_EVENT.record()
                GLOBAL_EVENT.wait()
                return y

        self.expect(
            self.trace(Module(), self.x)[1],
            "add = add(l_x_, 1) @1; record_event = record_event(2, 1) @1; wait_event = wait_event(2, 3) @3; "
            "mul = mul(add, 2) @3; record_event_1 = record_event(4, 3) @3; wait_event_1 = wait_event(4, 0); "
            "return mul",
        )

    def test_another_stream_as_argument_needs_no_new_code(self) -> None:
        def fn(x, s, event):
            with s:
                y = x + 1
                event.record()
            return y

        compiled, graphs = self.compile(fn)
        for stream in (self.s, self.s2):
            log = self.during(compiled, self.x, stream, torch.cuda.Event())
            self.assertEqual([line.split(" on ")[-1] for line in log], [f"stream {stream.stream_id}"])
        self.assertEqual(len(graphs.texts), 1)

    def test_event_reached_by_two_names_has_one_index(self) -> None:
        event = torch.cuda.Event()

        def fn(x, other):
            event.record()
            other.wait()
            return x + 1

        compiled, graphs = self.compile(fn)
        compiled(self.x, event)
        self.expect(
            graphs.texts[0],
            "record_event = record_event(1, 0); wait_event = wait_event(1, 0); add = add(l_x_, 1); return add",
        )
        compiled(self.x, torch.cuda.Event())
        self.expect(
            graphs.texts[1],
            "record_event = record_event(1, 0); wait_event = wait_event(2, 0); add = add(l_x_, 1); return add",
        )

    @pytest.mark.each_hook
    def test_event_returned_is_the_one_recorded(self) -> None:
        def fn(x):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            y = x + 1
            end.record()
            return y, start, end

        compiled, _ = self.compile(fn)
        _, start, end = compiled(self.x)
        self.assertGreater(start.elapsed_time(end), 0)
        self.assertIsNot(compiled(self.x)[1], start, "each call returns its own event")
        self.assertGreater(start.elapsed_time(end), 0)

    def test_event_stored_in_a_module_is_the_one_recorded(self) -> None:
        class Module(torch.nn.Module):
            def forward(self, x):
                self.done = torch.cuda.Event(enable_timing=True)
                self.done.record()
                return x + 1

        module = Module()
        self.trace(module, self.x)
        first = module.done
        self.assertEqual(first.elapsed_time(first), 0)

    def test_stream_of_the_frame_is_made_at_run_time_and_once(self) -> None:
        def fn(x):
            s = torch.cuda.Stream(priority=-1)
            with s:
                return x + 1

        (_), graphs = self.trace(fn, self.x)
        info = graphs.objects[0][1]
        self.assertEqual((info.origin, info.escapes, info.priority), ("frame", False, -1))
        compiled, _ = self.compile(fn)
        first = self.during(compiled, self.x)
        self.assertEqual(len([line for line in first if line.startswith("new")]), 1)
        self.assertEqual(self.during(compiled, self.x), [])

    def test_stream_returned_is_new_at_each_call(self) -> None:
        def fn(x):
            s = torch.cuda.Stream()
            return x + 1, s

        compiled, graphs = self.compile(fn)
        first, second = compiled(self.x)[1], compiled(self.x)[1]
        self.assertNotEqual(first, second)
        self.assertTrue(graphs.objects[0][1].escapes)

    def test_constructor_arguments(self) -> None:
        def fn(x):
            made = [
                torch.cuda.Event(True),
                torch.cuda.Event(True, False),
                torch.cuda.Event(enable_timing=True, blocking=True),
                torch.Event(enable_timing=True),
                torch.Event(device="cuda"),
                torch.cuda.Stream(0, -1),
                torch.cuda.Stream(device="cuda:0"),
                torch.cuda.Stream(torch.device("cuda")),
                torch.Stream(device="cuda"),
                torch.Stream("cuda:0", priority=-1),
            ]
            return x + 1, made

        (_, made), _ = self.trace(fn, self.x)
        self.assertEqual([type(one) for one in made], [type(one) for one in fn(self.x)[1]])
        made[0].record()
        self.assertEqual(made[0].elapsed_time(made[0]), 0)
        self.assertEqual([made[index].priority for index in (5, 6)], [-1, 0])

    def test_constructor_that_fails_fails_as_in_eager(self) -> None:
        def fn(x):
            return x + 1, torch.cuda.Event(colour="red")

        with self.assertRaisesRegex(torch._dynamo.exc.Unsupported, "The constructor fails"):
            self.trace(fn, self.x)
        with self.assertRaisesRegex(TypeError, "colour"):
            self.trace(fn, self.x, fullgraph=False)

    def test_external_stream(self) -> None:
        outside = torch.cuda.ExternalStream(0x5550)

        def fn(x, pointer):
            inside = torch.cuda.ExternalStream(pointer)
            with outside:
                y = x + 1
            with inside:
                return y * 2, inside, inside.cuda_stream

        compiled, graphs = self.compile(fn)
        for pointer in (0x1110, 0x2220):
            _, stream, handle = compiled(self.x, pointer)
            self.assertEqual((stream.cuda_stream, type(stream)), (pointer, torch.cuda.ExternalStream))
            self.assertEqual(handle, pointer)
        self.expect(
            graphs.texts[0],
            "add = add(l_x_, 1) @2; mul = mul(add, 2) @1; stream_handle_default = stream_handle(1) @1; "
            "item = item(stream_handle_default) @1; return mul, item",
        )

    def test_attributes(self) -> None:
        def fn(x, s):
            return (
                x + 1,
                (s.device, s.device_index, s.device_type, s.priority, s.cuda_stream, s.stream_id),
                (isinstance(s, torch.cuda.Stream), isinstance(s, torch.Stream), s is s),
                torch.cuda.Stream(priority=-9).priority,
                torch.cuda.Stream(device=0).device,
                torch.cuda.current_stream().device,
                hash(s),
            )

        compiled, _ = self.compile(fn)
        for stream in (self.s, self.s2, torch.cuda.Stream(priority=-1)):
            self.assertEqual(compiled(self.x, stream)[1:], fn(self.x, stream)[1:])

    def test_streams_and_events_as_keys(self) -> None:
        table = {self.s: 1, self.s2: 2}

        def fn(x, s):
            event = torch.cuda.Event()
            local = {s: 10, event: 30, torch.cuda.current_stream(): 40, torch.cuda.Stream(): 50}
            return x + 1, table[s], local[s], local[event], len(local), len({s, s, torch.cuda.current_stream()})

        compiled, _ = self.compile(fn)
        for stream in (self.s, self.s2):
            self.assertEqual(compiled(self.x, stream)[1:], fn(self.x, stream)[1:])

    def test_comparison_of_two_streams_is_guarded(self) -> None:
        def fn(x, a, b):
            return x + 1, a == b, a != b, a is b

        compiled, _ = self.compile(fn)
        for a, b in ((self.s, self.s), (self.s, self.s2), (self.s2, self.s2)):
            self.assertEqual(compiled(self.x, a, b)[1:], fn(self.x, a, b)[1:])

    def test_prefetch_loop(self) -> None:
        """The usual double buffering: copy the next batch on a stream of its own while this one is used."""

        class Prefetcher:
            def __init__(self, batches, stream):
                self.batches = batches
                self.stream = stream
                self.position = 0
                self.preload()

            def preload(self):
                if self.position == len(self.batches):
                    self.next = None
                    return
                with torch.cuda.stream(self.stream):
                    self.next = self.batches[self.position].to("cuda", non_blocking=True)
                self.position += 1

            def take(self):
                torch.cuda.current_stream().wait_stream(self.stream)
                batch = self.next
                batch.record_stream(torch.cuda.current_stream())
                self.preload()
                return batch

        def fn(batches, w):
            prefetcher = Prefetcher(batches, torch.cuda.Stream())
            total = w * 0
            while prefetcher.next is not None:
                total = total + prefetcher.take() * w
            return total

        batches = [torch.empty(8, device="cpu") for _ in range(2)]
        self.expect(
            self.trace(fn, batches, self.x)[1],
            "mul = mul(l_w_, 0); to = to(l_batches_0_, cuda) @1; wait_stream = wait_stream(0, 1); "
            "record_stream = record_stream(to, 0); mul_1 = mul(to, l_w_); add = add(mul, mul_1); "
            "to_1 = to(l_batches_1_, cuda) @1; wait_stream_1 = wait_stream(0, 1); "
            "record_stream_1 = record_stream(to_1, 0); mul_2 = mul(to_1, l_w_); add_1 = add(add, mul_2); "
            "return add_1",
        )


class TestLifetime(StreamTestCase):
    def test_calls_keep_nothing_alive(self) -> None:
        """Upstream keeps two objects alive for each call."""

        def fn(x):
            s, event = torch.cuda.Stream(), torch.cuda.Event()
            with s:
                y = x + 1
                event.record()
            event.wait()
            return y, torch.cuda.Event()

        compiled, _ = self.compile(fn)
        compiled(self.x)
        gc.collect()
        before = sum(isinstance(one, (torch.Stream, torch.Event)) for one in gc.get_objects())
        for _ in range(10):
            compiled(self.x)
        gc.collect()
        after = sum(isinstance(one, (torch.Stream, torch.Event)) for one in gc.get_objects())
        self.assertEqual(before, after)
        self.assertEqual(torch._dynamo.graph_bytecode_inputs.keep_alive, [])

    def test_callers_objects_are_released_after_the_call(self) -> None:
        def fn(x, event):
            event.record()
            return x + 1

        compiled, _ = self.compile(fn)
        compiled(self.x, torch.cuda.Event())
        event = torch.cuda.Event()
        alive = weakref.ref(event)
        compiled(self.x, event)
        del event
        self.assertIsNone(alive())
        self.assertIsNone(objects.current())

    def test_objects_of_the_frame_go_with_the_code(self) -> None:
        def make():
            def fn(x):
                event = torch.cuda.Event()
                event.record()
                return x + 1

            return fn

        def all_owned():
            return [one for one in gc.get_objects() if type(one) is objects.Owned]

        others = all_owned()  # what tests before have left
        known = {id(one) for one in others}
        compiled, _ = self.compile(make())
        compiled(self.x)
        owned = [one for one in all_owned() if id(one) not in known]
        self.assertEqual(len(owned), 1)
        alive = weakref.ref(owned.pop())
        torch._dynamo.reset()
        del compiled
        gc.collect()
        self.assertIsNone(alive())

    def test_nested_call_does_not_disturb_the_outer_graph(self) -> None:
        """While a graph runs, a function is called that is compiled then and there."""
        outer_event, inner_event = torch.cuda.Event(), torch.cuda.Event()

        def inner(x):
            inner_event.record()
            return x + 1

        inner_compiled, inner_graphs = self.compile(inner)
        seen: list[object] = []

        def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            def run(*inputs: Any) -> Any:
                seen.append(objects.get(1))
                inner_compiled(self.x)
                seen.append(objects.get(1))
                return gm.forward(*inputs)

            return run

        def outer(x):
            outer_event.record()
            return x * 2, torch.cuda.Event()

        torch.compile(outer, backend=backend, fullgraph=True)(self.x)
        self.assertEqual(len(inner_graphs.texts), 1)
        self.assertIs(seen[0], outer_event)
        self.assertIs(seen[1], outer_event)

    def test_failing_nested_call_puts_the_outer_table_back(self) -> None:
        def fn(x, event):
            event.record()
            return x + 1

        def fails(*inputs: Any) -> Any:
            raise ZeroDivisionError

        leave = objects.enter(self.s)
        with self.assertRaises(ZeroDivisionError):
            torch.compile(fn, backend=lambda gm, inputs: fails)(self.x, torch.cuda.Event())
        self.assertIs(objects.get(0), self.s)
        leave()

    def test_graph_break_between_two_compiled_functions(self) -> None:
        a, b = torch.cuda.Event(), torch.cuda.Event()

        def inner(x):
            b.record(self.s2)
            return x * 2

        inner_compiled = torch.compile(inner, backend="eager")
        uncompiled = torch._dynamo.disable(inner_compiled, recursive=False)

        def outer(x):
            y = x + 1
            a.record(self.s)
            y = uncompiled(y)
            a.record(self.s)
            return y

        compiled, _ = self.compile(outer, fullgraph=False)
        log = self.during(compiled, self.x)
        self.assertEqual(
            [line.split(" on ")[-1] for line in log if "record" in line],
            [f"stream {s.stream_id}" for s in (self.s, self.s2, self.s)],
        )

    def test_compiled_functions_in_two_threads(self) -> None:
        barrier = threading.Barrier(2, timeout=60)

        def worker(event: torch.cuda.Event) -> None:
            def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
                def run(*inputs: Any) -> Any:
                    barrier.wait()  # both threads are inside their graphs
                    self.assertIs(objects.get(1), event)
                    barrier.wait()
                    return gm.forward(*inputs)

                return run

            def fn(x):
                event.record()
                return x + 1

            compiled = torch.compile(fn, backend=backend, fullgraph=True)
            try:
                for _ in range(5):
                    compiled(torch.zeros(2))
            except BaseException:
                barrier.abort()
                raise

        with ThreadPoolExecutor(2) as pool:
            self.assertEqual([*pool.map(worker, [torch.cuda.Event() for _ in range(2)])], [None, None])

    def test_each_thread_has_its_own_event_of_the_frame(self) -> None:
        owned = objects.Owned(torch.cuda.Event, (), {})
        made = owned.resolve()
        self.assertIs(made, owned.resolve())
        with ThreadPoolExecutor(1) as pool:
            self.assertIsNot(made, pool.submit(owned.resolve).result())

    def test_look_up_outside_a_call_is_an_error(self) -> None:
        with self.assertRaisesRegex(RuntimeError, "outside the call"):
            objects.get(0)


class TestGraphBreaks(StreamTestCase):
    def test_break_in_a_block_keeps_both_halves_compiled(self) -> None:
        """Upstream runs the whole frame eagerly."""
        look, seen = looker()

        def fn(x, s):
            with torch.cuda.stream(s):
                y = x + 1
                look()
                y = y * 2
            return y - 3

        self.expect(
            self.trace(fn, self.x, self.s, fullgraph=False)[1],
            "add = add(l_x_, 1) @1; return add; ----; mul = mul(l_y_, 2) @1; sub = sub(mul, 3); return sub",
        )
        self.assertEqual(seen, [self.s])
        self.assertEqual(torch.cuda.current_stream(), torch.cuda.default_stream())

    def test_break_in_a_block_compiles_once(self) -> None:
        def fn(x, s):
            with torch.cuda.stream(s):
                y = x + 1
                torch._dynamo.graph_break()
                y = y * 2
            return y - 3

        compiled, graphs = self.compile(fn, fullgraph=False)
        for stream in (self.s, self.s2, torch.cuda.Stream()):
            log = self.during(compiled, self.x, stream)
            self.assertIn(f"set stream {stream.stream_id}", log)
        self.assertEqual(len(graphs.texts), 2)

    def test_break_in_nested_blocks(self) -> None:
        s, s2 = self.s, self.s2
        look, seen = looker()

        def fn(x):
            with s:
                y = x + 1
                with torch.cuda.stream(s2), s:
                    look()
                    y = y * 2
                look()
                y = y - 3
            look()
            return y / 4

        self.expect(
            self.trace(fn, self.x, fullgraph=False)[1],
            "add = add(l_x_, 1) @1; return add; ----; mul = mul(l_y_, 2) @1; return mul; ----; "
            "sub = sub(l_y_, 3) @1; return sub; ----; truediv = truediv(l_y_, 4); return truediv",
        )
        self.assertEqual(seen, [s, s, torch.cuda.default_stream()])

    @graph("add = add(l_x_, 1) @1; return add", "mul = mul(l_y_, 2) @1; return mul")
    def test_break_in_a_block_of_a_stream_of_the_frame(x):
        s = torch.cuda.Stream()
        with s:
            y = x + 1
            torch._dynamo.graph_break()
            y = y * 2
        return y, s

    def test_stream_alive_across_a_break_stays_a_stream(self) -> None:
        """pytorch#187472, #184487: it became a StreamContext, and waits after the break were left out."""

        def fn(x, s):
            local = s
            event = torch.cuda.Event()
            with local:
                y = x + 1
                event.record()
            torch._dynamo.graph_break()
            event.wait()
            y.record_stream(local)
            return y * 2, local

        (_, local), graphs = self.trace(fn, self.x, self.s, fullgraph=False)
        self.expect(
            graphs,
            "add = add(l_x_, 1) @2; record_event = record_event(1, 2) @2; return add; ----; "
            "wait_event = wait_event(1, 0); record_stream = record_stream(l_y_, 2); mul = mul(l_y_, 2); "
            "return mul",
        )
        self.assertIs(local, self.s)

    @graph("add = add(l_x_, 1); return add", "mul = mul(l_y_, 2) @1; return mul")
    def test_context_made_before_a_break_and_entered_after(x, s):
        context = torch.cuda.stream(s)
        y = x + 1
        torch._dynamo.graph_break()
        with context:
            return y * 2

    def test_set_stream_before_a_break_holds_for_it_and_after(self) -> None:
        look, seen = looker()

        def fn(x, s):
            torch.cuda.set_stream(s)
            y = x + 1
            look()
            return y * 2, torch.cuda.current_stream()

        (_, current), graphs = self.trace(fn, self.x, self.s, fullgraph=False)
        self.expect(graphs, "add = add(l_x_, 1) @1; return add; ----; mul = mul(l_y_, 2); return mul")
        self.assertEqual([*seen, current, torch.cuda.current_stream()], [self.s, self.s, self.s])

    def test_set_stream_inside_a_block_holds_across_a_break(self) -> None:
        look, seen = looker()

        def fn(x, s, s2):
            with s:
                torch.cuda.set_stream(s2)
                y = x + 1
                look()
                y = y * 2
            return y - 3

        self.expect(
            self.trace(fn, self.x, self.s, self.s2, fullgraph=False)[1],
            "add = add(l_x_, 1) @2; return add; ----; mul = mul(l_y_, 2) @1; sub = sub(mul, 3); return sub",
        )
        self.assertEqual([*seen, torch.cuda.current_stream()], [self.s2, torch.cuda.default_stream()])

    @graph(
        "add = add(l_x_, 1) @1; query_event_default = query_event(2) @1; item = item(query_event_default) @1; "
        "ne = ne(item, 0) @1; return ne, add",
        "mul = mul(l_y_, 2) @1; sub = sub(mul, 4) @1; return sub",
    )
    def test_data_dependent_branch_in_a_block(x, s, event):
        with s:
            y = x + 1
            if event.query():
                y = y * 2
            y = y - 4
        return y


class TestTwoDevices(StreamTestCase):
    devices = 2

    def setUp(self) -> None:
        super().setUp()
        self.x1 = torch.empty(8, device="cuda:1")
        self.t = torch.cuda.Stream(device=1)

    def test_current_stream_of_the_other_device_is_not_index_0(self) -> None:
        def fn(x):
            here, there = torch.cuda.current_stream(), torch.cuda.current_stream(1)
            there.wait_stream(here)
            return x + 1, there, torch.cuda.current_stream(torch.device("cuda:1")) == there, here == there

        compiled, graphs = self.compile(fn)
        _, there, same, equal = compiled(self.x)
        self.expect(graphs, "wait_stream = wait_stream(1, 0); add = add(l_x_, 1); return add")
        self.assertEqual((there, same, equal), (torch.cuda.current_stream(1), True, False))
        with torch.cuda.stream(self.t):
            pass
        with torch.cuda.device(1):
            torch.cuda.set_stream(self.t)
        self.assertEqual(compiled(self.x)[1], self.t)

    def test_entering_a_stream_of_the_other_device_makes_it_current(self) -> None:
        t = self.t

        def fn(x, x1):
            with torch.cuda.stream(t):
                y1 = x1 + 1
                z1 = torch.ones(8, device="cuda")
                inside = torch.cuda.current_stream()
                other = torch.cuda.current_stream(0)
            return y1, z1, inside, other, torch.cuda.current_stream()

        compiled, _ = self.compile(fn)
        _, z1, inside, other, after = compiled(self.x, self.x1)
        self.assertEqual(z1.device, torch.device("cuda:1"))
        self.assertEqual((inside, other, after), (t, torch.cuda.default_stream(0), torch.cuda.default_stream(0)))
        self.assertEqual(torch.cuda.current_device(), 0)

    def test_device_context_changes_what_is_current(self) -> None:
        def fn(x):
            with torch.cuda.device(1):
                event = torch.cuda.current_stream().record_event()
                torch.cuda.synchronize()
                default = torch.cuda.default_stream()
            event.wait()
            torch.cuda.synchronize()
            return x + 1, default

        (_, default), graphs = self.trace_loosely(fn, self.x)
        self.assertIn("record_event = record_event(2, 1)", str(graphs))
        self.assertIn("synchronize_device(cuda, 1)", str(graphs))
        self.assertIn("synchronize_device(cuda, None)", str(graphs))
        self.assertEqual(default, torch.cuda.default_stream(1))

    def trace_loosely(self, fn: Callable[..., Any], *args: Any) -> tuple[Any, Graphs]:
        """Dynamo executes device contexts while it traces, so the log is not empty."""
        compiled, graphs = self.compile(fn)
        return compiled(*args), graphs

    def test_set_stream_of_the_other_device_is_refused(self) -> None:
        def fn(x, t):
            torch.cuda.set_stream(t)
            return x + 1

        with self.assertRaisesRegex(torch._dynamo.exc.Unsupported, "set_stream also changes the current device"):
            self.trace(fn, self.x, self.t)
        torch.compile(fn, backend="eager")(self.x, self.t)
        self.assertEqual((torch.cuda.current_device(), torch.cuda.current_stream()), (1, self.t))


class TestContextsEnteredByCalls(StreamTestCase):
    @graph("add = add(l_x_, 1); mul = mul(add, 2) @1; sub = sub(mul, 3) @0; return sub")
    def test_exit_stack(x, s):
        y = x + 1
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.cuda.stream(s))
            y = y * 2
        return y - 3

    @graph("mul = mul(l_x_, 2) @2; add = add(mul, 1); sub = sub(add, 3) @1; return sub")
    def test_exit_stack_that_is_closed_behind_another_block_goes_back_into_it(x, s, s2):
        """As in eager: the context remembers the stream that was current when it was entered."""
        stack = contextlib.ExitStack()
        with s2:
            stack.enter_context(s)
            y = x * 2
        y = y + 1
        stack.close()
        y = y - 3
        torch.cuda.set_stream(torch.cuda.default_stream())
        return y

    def test_exit_stack_around_no_stream(self) -> None:
        def fn(x, s):
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.cuda.stream(s))
                stack.enter_context(contextlib.nullcontext())
                return x * 2

        self.assertEqual(str(self.trace(fn, self.x, None)[1]), "mul = mul(l_x_, 2)\nreturn mul")

    def test_caller_stays_where_it_was_at_no_cost(self) -> None:
        s = self.s

        def fn(x):
            with contextlib.ExitStack() as stack:
                stack.enter_context(s)
                return x * 2

        compiled, _ = self.compile(fn)
        compiled(self.x)
        self.assertEqual(self.during(compiled, self.x), [])

    def test_break_in_an_exit_stack_runs_the_frame_in_eager(self) -> None:
        def fn(x, s):
            stack = contextlib.ExitStack()
            stack.enter_context(torch.cuda.stream(s))
            y = x * 2
            torch._dynamo.graph_break()
            current = torch.cuda.current_stream()
            stack.close()
            return y, current

        (_, current), graphs = self.trace(fn, self.x, self.s, fullgraph=False)
        self.assertEqual((current, str(graphs)), (self.s, ""))

    def test_context_left_open_is_refused(self) -> None:
        def fn(x, s):
            context = torch.cuda.stream(s)
            context.__enter__()
            return x * 2, context

        with self.assertRaisesRegex(torch._dynamo.exc.Unsupported, "open where the graph ends.*\n.*with torch.cuda"):
            self.trace(fn, self.x, self.s)

    def test_context_that_was_not_entered_is_refused(self) -> None:
        def fn(x, s):
            s.__exit__(None, None, None)
            return x * 2

        with self.assertRaisesRegex(torch._dynamo.exc.Unsupported, "was not entered by one of `__enter__`"):
            self.trace(fn, self.x, self.s)


class TestClosures(StreamTestCase):
    def test_cell_is_looked_up_at_each_call(self) -> None:
        s = self.s

        class Branch:
            def run(self, x):
                with torch.cuda.stream(s):
                    return x * 2

        def fn(x):
            return Branch().run(x), s

        compiled, graphs = self.compile(fn)
        self.assertEqual(compiled(self.x)[1], self.s)
        s = self.s2
        self.assertEqual(compiled(self.x)[1], self.s2)
        self.assertEqual(graphs.texts, ["mul = mul(l_x_, 2) @1\nreturn mul"])

    def test_code_does_not_keep_the_function_alive(self) -> None:
        s = torch.cuda.Stream()

        class Branch:
            def __init__(self):
                self.s = s

            def run(self, x):
                with torch.cuda.stream(self.s):
                    return x * 2

        classes = [Branch]

        def fn(x):
            return classes[0]().run(x)

        self.trace(fn, self.x)
        reference = weakref.ref(Branch.__init__)
        del Branch
        classes.clear()
        if cache := vars(inspect).get("_shadowed_dict_from_mro_tuple"):
            cache.cache_clear()  # Python 3.12's, which keeps classes alive that Dynamo looks at
        gc.collect()
        self.assertIsNone(reference())


class TestLookups(StreamTestCase):
    def test_cached_property_makes_its_stream_once(self) -> None:
        class Block:
            @functools.cached_property
            def side(self):
                return torch.cuda.Stream()

        block = Block()

        def fn(x):
            with block.side:
                return x * 2

        compiled, graphs = self.compile(fn)
        compiled(self.x)
        first = block.side
        compiled(self.x)
        self.assertIs(block.side, first)
        self.assertEqual(graphs.texts, ["mul = mul(l_x_, 2) @1\nreturn mul"] * 2)
        self.assertEqual(sum("new" in line for line in self.log), 3)

    def test_each_thread_finds_its_stream(self) -> None:
        streams: dict[int, torch.cuda.Stream] = {}

        def fn(x):
            thread = threading.get_ident()
            if thread not in streams:
                streams[thread] = torch.cuda.Stream()
            with streams[thread]:
                return x * 2, torch.cuda.current_stream()

        compiled, _ = self.compile(fn)

        def work() -> None:
            with _disable_current_modes():
                found = [compiled(torch.empty(8))[1] for _ in range(3)]
            self.assertEqual(found, [streams[threading.get_ident()]] * 3)

        self.assertEqual([compiled(self.x)[1] for _ in range(3)], [streams[threading.get_ident()]] * 3)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()
        self.assertEqual(len({s.cuda_stream for s in streams.values()}), 2)

    def test_device_of_a_tensor(self) -> None:
        def fn(x, host, s):
            with torch.cuda.device_of(x), torch.cuda.device_of(host), s:
                return x * 2

        self.expect(
            self.trace(fn, self.x, torch.empty(2, device="cpu"), self.s)[1],
            "_cuda_exchange_device = _cuda_exchangeDevice(0); mul = mul(l_x_, 2) @1; "
            "_cuda_maybe_exchange_device = _cuda_maybeExchangeDevice(_cuda_exchange_device); return mul",
        )

    def test_frame_without_streams_is_traced_as_on_stock(self) -> None:
        class Block:
            @functools.cached_property
            def scale(self):
                return 3

        block = Block()

        def of_thread(x):
            y = x + 1
            return y * (threading.get_ident() > 0)

        def of_capture(x):
            y = x + 1
            return y * torch.cuda.is_current_stream_capturing()

        def of_tensor(x):
            y = x + 1
            with torch.cuda.device_of(x):
                return y * 2

        def cached(x):
            y = x + 1
            return y * block.scale

        for fn in (of_thread, of_capture, of_tensor, cached):
            torch._dynamo.reset()
            _, ours = self.trace(fn, self.x, fullgraph=False)
            torch._dynamo.reset()
            vars(block).clear()
            with config.patch(streams=False):
                _, stock = self.trace(fn, self.x, fullgraph=False)
            self.assertEqual(str(ours), str(stock), fn.__name__)

    def test_first_stream_may_come_after(self) -> None:
        def fn(x, s):
            y = x + 1
            thread = threading.get_ident()
            with s:
                return y * 2, thread

        self.trace(fn, self.x, self.s, fullgraph=False)
        self.assertEqual(dict(counters["graph_break"]), {})


class TestExport(StreamTestCase):
    def test_exported_as_on_stock(self) -> None:
        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.side, self.done = torch.cuda.Stream(), torch.cuda.Event()

            def forward(self, x):
                own = torch.cuda.Stream()
                for stream in (self.side, own):
                    stream.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(stream):
                        y = x * 2
                        self.done.record()
                    self.done.wait()
                return y + 1

        def export() -> list[Any]:
            program = torch.export.export(Block(), (self.x,), strict=True)
            self.assertEqual(program.module()(self.x).shape, self.x.shape)
            return [(str(n.target), [a for a in n.args if isinstance(a, int)]) for n in program.graph.nodes]

        with config.patch(streams=False):
            stock = export()
        torch._dynamo.reset()
        self.assertEqual(export(), stock)
        self.assertEqual(sum("streams" in target for target, _ in stock), 6)


class TestRanges(StreamTestCase):
    def graph(self, fn: Callable[..., Any], *args: Any, fullgraph: bool = True, **options: Any) -> str:
        torch._dynamo.reset()
        with config.patch(**options):
            self.result, graphs = self.trace(fn, *args, fullgraph=fullgraph)
        return str(graphs)

    def annotated(self, x):
        s = self.s

        @torch.cuda.nvtx.range("branch")
        def branch(x):
            return x * 2

        with torch.cuda.nvtx.range("step {}", 3), torch.profiler.record_function("outer", "of all"):
            depth = torch.cuda.nvtx.range_push("side")
            with s:
                y = branch(x)
            torch.cuda.nvtx.range_pop()
        torch.cuda.nvtx.mark("done")
        number = torch.cuda.nvtx.range_start("across")
        y = y + 1
        torch.cuda.nvtx.range_end(number)
        return y, depth

    @pytest.mark.each_hook
    def test_ranges_that_nobody_wants_are_left_out(self) -> None:
        expected = "mul = mul(l_x_, 2) @1\nadd = add(mul, 1)\nreturn add"
        for options in ({}, {"nvtx": False}):
            self.assertEqual(self.graph(self.annotated, self.x, **options), expected)
        self.assertEqual(self.result[1], -2)  # as NVTX answers without a tool
        self.assertEqual(self.graph(self.annotated, self.x, fullgraph=False), expected)

    def test_ranges_stay_in_order(self) -> None:
        def fn(x, s):
            with torch.cuda.nvtx.range("step {}", 3), torch.profiler.record_function("outer", "of all"):
                torch.cuda.nvtx.range_push("side")
                with s:
                    y = x * 2
                torch.cuda.nvtx.range_pop()
            torch.cuda.nvtx.mark("done")
            return y + 1

        expected = """\
range_push = range_push(nvtx, step 3, None)
range_push_1 = range_push(record_function, outer, of all)
range_push_2 = range_push(nvtx, side, None)
mul = mul(l_x_, 2) @1
range_pop = range_pop(nvtx)
range_pop_1 = range_pop(record_function)
range_pop_2 = range_pop(nvtx)
range_mark = range_mark(done)
add = add(mul, 1)
return add"""
        text = re.sub(r"range_(push|pop|mark)_default", r"range_\1", self.graph(fn, self.x, self.s, nvtx=True))
        self.assertEqual(text, expected)
        with mock.patch.dict("os.environ", {"NVTX_INJECTION64_PATH": "/opt/tool.so"}):
            self.assertEqual(
                self.graph(fn, self.x, self.s).count("range_"), text.replace("_default", "").count("range_")
            )
        with torch.autograd.profiler.profile(use_cpu=True):
            self.assertIn("side", self.graph(fn, self.x, self.s))
            self.assertNotIn("side", self.graph(fn, self.x, self.s, nvtx=False))

    def test_ranges_that_stay_are_seen_by_the_tool(self) -> None:
        def fn(x, s):
            with torch.cuda.nvtx.range("step"), torch.profiler.record_function("outer"):
                with torch.profiler.record_function("inner"), s:
                    y = x * 2
                torch.cuda.nvtx.mark("done")
            return y

        compiled, _ = self.compile(fn)
        with config.patch(nvtx=True):
            compiled(self.x, self.s)
        tool = mock.Mock()
        with mock.patch("torch.cuda.nvtx._nvtx", tool), torch.autograd.profiler.profile(use_cpu=True) as profile:
            compiled(self.x, self.s)
        self.assertEqual(tool.mock_calls, [mock.call.rangePushA("step"), mock.call.markA("done"), mock.call.rangePop()])
        seen = {e.name: e.time_range for e in profile.function_events if e.name in ("outer", "inner")}
        self.assertTrue(seen["outer"].start <= seen["inner"].start <= seen["inner"].end <= seen["outer"].end)

    def test_upstreams_option_keeps_ranges_of_record_function(self) -> None:
        def fn(x, s):
            with torch.cuda.nvtx.range("step"), torch.profiler.record_function("outer"), s:
                return x * 2

        with torch._dynamo.config.patch(capture_profiler_record_function=True):
            self.expect(
                self.graph(fn, self.x, self.s),
                "range_push_default = range_push(record_function, outer, None); mul = mul(l_x_, 2) @1; "
                "range_pop_default = range_pop(record_function); return mul",
            )

    def test_range_that_ends_in_other_code_stays(self) -> None:
        """Eager code, or another graph, opens it or closes it."""

        def opens(x, s):
            torch.cuda.nvtx.range_push("step")
            torch.cuda.nvtx.range_push("inside")
            with s:
                y = x * 2
            torch.cuda.nvtx.range_pop()
            return y

        def closes(x, s):
            with s:
                y = x * 2
            torch.cuda.nvtx.range_pop()
            return y

        self.assertIn("range_push(nvtx, step, None)\nmul = mul(l_x_, 2) @1\nreturn", self.graph(opens, self.x, self.s))
        self.assertIn("@1\nrange_pop_default = range_pop(nvtx)\n", self.graph(closes, self.x, self.s))

    def test_break_in_a_range_compiles_both_halves(self) -> None:
        def fn(x, s):
            with torch.cuda.nvtx.range("step"), s:
                y = x * 2
                torch._dynamo.graph_break()
                return y + 1

        self.assertEqual(
            self.graph(fn, self.x, self.s, fullgraph=False),
            "mul = mul(l_x_, 2) @1\nreturn mul\n----\nadd = add(l_y_, 1) @1\nreturn add",
        )

    def test_stack_of_contexts_holds_ranges(self) -> None:
        def fn(x, s):
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.profiler.record_function("outer"))
                stack.enter_context(torch.cuda.nvtx.range("inner"))
                stack.enter_context(s)
                return x * 2

        self.assertEqual(self.graph(fn, self.x, self.s), "mul = mul(l_x_, 2) @1\nreturn mul")
        self.expect(
            self.graph(fn, self.x, self.s, nvtx=True),
            "range_push_default = range_push(record_function, outer, None); "
            "range_push_default_1 = range_push(nvtx, inner, None); mul = mul(l_x_, 2) @1; "
            "range_pop_default = range_pop(nvtx) @0; range_pop_default_1 = range_pop(record_function) @0; "
            "return mul",
        )

    def test_name_that_only_the_run_knows_is_refused_where_it_is_wanted(self) -> None:
        def fn(x, s):
            with torch.cuda.nvtx.range(f"on {s}"), s:
                return x * 2

        self.assertEqual(self.graph(fn, self.x, self.s), "mul = mul(l_x_, 2) @1\nreturn mul")
        with self.assertRaisesRegex(
            torch._dynamo.exc.Unsupported, "(?s)known only at run time.*constant name.*nvtx = F"
        ):
            self.graph(fn, self.x, self.s, nvtx=True)

    def test_frame_without_streams_is_traced_as_on_stock(self) -> None:
        def pushes(x):
            y = x + 1
            torch.cuda.nvtx.range_push("side")
            y = y * 2
            torch.cuda.nvtx.range_pop()
            return y - 3

        def records(x):
            with torch.profiler.record_function("outer"):
                return x + 1

        def stacked(x):
            with contextlib.ExitStack() as stack:
                stack.enter_context(torch.profiler.record_function("outer"))
                return x + 1

        for fn in (pushes, records, stacked):
            for nvtx in (True, None):
                ours = self.graph(fn, self.x, fullgraph=False, nvtx=nvtx)
                self.assertEqual(ours, self.graph(fn, self.x, fullgraph=False, streams=False), fn.__name__)


class TestSwitch(StreamTestCase):
    def test_off_gives_upstreams_handling_back(self) -> None:
        def fn(x):
            with torch.cuda.stream(None):
                return x + 1

        with config.patch(streams=False), self.assertRaisesRegex(Exception, "user_object_index"):
            self.trace(fn, self.x)
        torch._dynamo.reset()
        self.trace(fn, self.x)
