"""Timelines: the clock of a trace, the picture, the trace for Perfetto, profiles, the command line."""

import json
import re
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from corpus import forked
from torch import nn
from torch._inductor.test_case import TestCase
from written_traces import Written

import form
from printed import printed
from torch_overlay import config
from torch_overlay._cli import commands, program
from torch_overlay._functorch.offload import log
from torch_overlay.analysis import Timeline, timeline, Trace
from torch_overlay.analysis.doctor import Diagnosis
from torch_overlay.analysis.race_check.trace import HOST, Launch
from torch_overlay.analysis.timelines import profile
from torch_overlay.analysis.timelines.clock import Cost, schedule
from torch_overlay.analysis.timelines.layout import CHARACTER, FONT, LEFT, MARGIN, WIDTH
from torch_overlay.analysis.timelines.lines import functions, own_line, readable, saved_tensors
from torch_overlay.analysis.timelines.model import FROM_HOST, KERNEL, Lane, Slice, TO_HOST, with_hidden
from torch_overlay.analysis.timelines.timeline import events
from torch_overlay.testing import compile_only, simulated_gpu


class Program:
    """A trace with a cost for each launch: by name, for those that are written in the notation of `written_traces`."""

    def __init__(self, text: str = "", **us: float) -> None:
        self.trace = Written(text) if text else Trace()
        self.costs = {i: Cost(us[op.name]) for i, op in enumerate(self.trace.operations) if isinstance(op, Launch)}

    def run(
        self, name: str, on: str, us: float, line: str = "", kind: str = KERNEL, nbytes: int = 0, **use: Any
    ) -> None:
        self.costs[len(self.trace.operations)] = Cost(us, kind, nbytes)
        self.trace.launch(name, on, use.get("reads", ()), use.get("writes", ()), line)

    def timeline(self, **kwargs: Any) -> Timeline:
        return Timeline(**schedule(self.trace.operations, self.costs, title="program", **kwargs))

    def times(self) -> dict[str, tuple[float, float]]:
        return {s.name: (s.start, s.end) for s in self.timeline().slices}


def of_trace(*args: Any) -> Timeline:
    return Timeline(**profile.of_trace(*args))


def fork_and_join() -> Program:
    p = Program()
    a, b = p.trace.alloc("a", 4096, "main"), p.trace.alloc("b", 8192, "side")
    p.run("mm", "main", 10.0, "net.py:3: a = x @ w", writes=[a])
    p.trace.record("event 1", "main")
    p.trace.wait("event 1", "side")
    p.run("relu", "side", 20.0, "net.py:5: b = a.relu()", reads=[a], writes=[b])
    p.run("sin", "main", 5.0, "net.py:6: c = x.sin()")
    p.trace.record("event 2", "side")
    p.trace.wait("event 2", "main")
    p.run("add", "main", 4.0, "net.py:7: return b + c", reads=[b])
    p.trace.free(a)
    p.trace.free(b)
    return p


class TestClock(TestCase):
    def test_stream_waits_for_what_an_event_follows(self) -> None:
        expected = {"mm": (0, 10), "relu": (10, 30), "sin": (10, 15), "add": (30, 34)}
        self.assertEqual(fork_and_join().times(), expected)

    def test_arrow_joins_what_was_waited_for_and_what_waited(self) -> None:
        found = fork_and_join().timeline()
        name = [s.name for s in found.slices]
        arrows = [(a.name, name[a.source], a.source_at, name[a.target], a.at) for a in found.arrows]
        self.assertEqual(arrows, [("event 1", "mm", 10, "relu", 10), ("event 2", "relu", 30, "add", 30)])

    def test_event_that_was_never_recorded_holds_nothing_up(self) -> None:
        p = Program("main first; wait e side; side second", first=10, second=1)
        self.assertEqual(p.times()["second"], (0, 1))

    def test_later_record_of_an_event_does_not_move_an_earlier_wait(self) -> None:
        text = "main first; record e main; wait e side; main long; record e main; side second"
        self.assertEqual(Program(text, first=10, long=90, second=1).times()["second"], (10, 11))

    def test_host_waits_for_a_stream_and_launches_nothing_meanwhile(self) -> None:
        p = Program("main first; synchronize main; side second", first=10, second=1)
        self.assertEqual(p.times(), {"first": (0, 10), "waits for main": (0, 10), "second": (10, 11)})
        self.assertEqual([lane.name for lane in p.timeline().lanes], ["main", "side", HOST])

    def test_host_computes_in_its_own_time(self) -> None:
        self.assertEqual(Program("host computes; main after", computes=7, after=1).times()["after"], (7, 8))

    def test_copies_of_one_direction_share_the_link(self) -> None:
        p = Program()
        for stream, kind in (("a", TO_HOST), ("b", TO_HOST), ("c", FROM_HOST)):
            p.run("aten.copy_.default", stream, 10.0, kind=kind)
        self.assertEqual([(s.start, s.end) for s in p.timeline().slices], [(0, 10), (10, 20), (0, 10)])

    def test_lane_of_copies_says_so(self) -> None:
        p = Program()
        p.run("aten.copy_.default", "stream 1", 10.0, kind=TO_HOST)
        p.run("mm", "main", 1.0)
        self.assertEqual([lane.name for lane in p.timeline().lanes], ["main", "stream 1, to the host"])

    def test_memory_is_taken_by_the_first_kernel_and_freed_behind_the_last(self) -> None:
        # a is of the stream main, which is after its last reader on side only when it has waited for it.
        self.assertEqual(fork_and_join().timeline().memory, ((0, 4096), (10, 12288), (34, 0)))

    def test_memory_of_the_caller_is_not_counted(self) -> None:
        p = Program("main allocates a; main reads a", reads=1)
        self.assertEqual(p.timeline().memory, ((0, 64),))
        self.assertEqual(schedule(p.trace.operations[1:], {0: Cost(1)}, title="without the allocation")["memory"], ())

    def test_names_are_readable(self) -> None:
        self.assertEqual(readable("triton_poi_fused_add_cos_0"), "add_cos")
        self.assertEqual(readable("triton_per_fused__fused_rms_norm_12"), "fused_rms_norm")
        self.assertEqual(readable("triton_tem_fused_mm_3"), "mm")
        self.assertEqual(readable("aten.mm.out"), "mm")
        self.assertEqual(readable("my_kernel"), "my_kernel")

    def test_line_of_a_fused_kernel_is_that_of_its_result(self) -> None:
        self.assertEqual(own_line("a.py:1: x = 1; y = 2; b.py:22: z = x"), "b.py:22: z = x")
        self.assertEqual(own_line("a.py:1: x = 1; y = 2"), "a.py:1: x = 1; y = 2")


class TestHidden(TestCase):
    def hidden(self, *work: tuple[int, float, float, str]) -> list[float | None]:
        lanes = [Lane("main"), Lane("side"), Lane("other device", 1)]
        slices = [Slice(lane, start, end - start, "x", kind=kind) for lane, start, end, kind in work]
        return [s.hidden for s in with_hidden(lanes, slices) if s.kind != KERNEL]

    def test_part_of_a_copy_beside_kernels(self) -> None:
        self.assertEqual(self.hidden((0, 0, 10, KERNEL), (0, 15, 20, KERNEL), (1, 5, 25, TO_HOST)), [0.5])

    def test_kernels_that_overlap_hide_once(self) -> None:
        self.assertEqual(self.hidden((0, 0, 10, KERNEL), (1, 5, 12, KERNEL), (1, 0, 24, FROM_HOST)), [0.5])

    def test_kernels_of_another_device_hide_nothing(self) -> None:
        self.assertEqual(self.hidden((2, 0, 10, KERNEL), (1, 0, 10, TO_HOST)), [0.0])

    def test_copies_do_not_hide_each_other(self) -> None:
        self.assertEqual(self.hidden((0, 0, 10, TO_HOST), (1, 0, 10, FROM_HOST)), [0.0, 0.0])


# ---- the picture


def many_kernels(count: int, streams: int = 4) -> Timeline:
    """Kernels of very different lengths, on several streams, of many lines, with events between them."""
    p = Program()
    names = ("mm", "fused_add_rsqrt_mul", "softmax", "scaled_dot_product_attention_backward", "gelu")
    for i in range(count):
        stream = f"stream {i * 7 % streams}"
        us = (2.0, 2.4, 3.1, 9.0, 55.0, 140.0)[i * 5 % 6]
        line = "" if i % 11 == 0 else f"model_{i % 3}.py:{10 + i % 40}: x = layer_{i % 40}(x)"
        if i % 13 == 0:
            p.run("aten.copy_.default", "stream 9", 30.0, line, kind=TO_HOST, nbytes=1 << 20)
            p.trace.record(f"event {i}", "stream 9")
        elif i % 5 == 0:
            p.trace.wait(f"event {i // 13 * 13}", stream)
        p.run(f"triton_poi_fused_{names[i % 5]}_{i}", stream, us, line)
    return p.timeline()


def label_boxes(svg: str) -> list[tuple[float, float, float, float, str]]:
    """Left, top, right, bottom of all text."""
    found = []
    for element in ET.fromstring(svg).iter():
        if not element.tag.endswith("}text"):
            continue
        text = element.text or ""
        size = 12 if element.get("class") == "title" else FONT
        width = len(text) * CHARACTER * size / FONT
        x, y = float(element.get("x", 0)), float(element.get("y", 0))
        left = x - width if element.get("text-anchor") == "end" else x
        found.append((left, y - 0.78 * size, left + width, y + 0.22 * size, text))
    return found


def collisions(svg: str) -> list[tuple[str, str]]:
    boxes = label_boxes(svg)
    return [
        (a[4], b[4])
        for i, a in enumerate(boxes)
        for b in boxes[:i]
        if min(a[2], b[2]) - max(a[0], b[0]) > 0.5 and min(a[3], b[3]) - max(a[1], b[1]) > 0.5
    ]


def drawn(svg: str) -> str:
    """Text, boxes and arrows with their places, in order."""
    found = []
    for e in ET.fromstring(svg).iter():
        at = f"{e.get('x', '')},{e.get('y', '')}"
        if e.tag.endswith("}text"):
            found.append(f"text {at} {e.text}")
        elif e.tag.endswith("}g"):
            found.append(f"box {e[1].get('x')},{e[1].get('y')} width {e[1].get('width')}")
        elif "event" in (e.get("class") or ""):
            points = re.findall(r"[-.0-9]+ [-.0-9]+", e.get("d") or "")
            found.append(f"arrow {points[0]} to {points[-1]}: {e[0].text}")
    return "\n".join(found).replace("µ", "u").replace("×", "x")


def contrast(*colours: str) -> float:
    """The contrast of two colours, as WCAG 2 defines it."""
    found = []
    for colour in colours:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        found.append(0.05 + sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear)))
    return max(found) / min(found)


class TestPicture(TestCase):
    maxDiff = None

    def test_two_streams(self) -> None:
        lines = drawn(fork_and_join().timeline().svg()).splitlines()
        self.assertExpectedInline(
            "\n".join([*lines[:3], *(line for line in lines if not line.startswith("text"))]),
            """\
text 8.0,18.0 program
text 8.0,30.0 4 kernels, 2 streams, 2 waits, about 34.0 us, streams side by side
text 8.0,42.0 for 15%, 12.0 KiB at the peak
box 84.0,71.0 width 90.6
box 174.6,71.0 width 45.3
box 355.8,71.0 width 36.2
box 174.6,99.0 width 181.2
arrow 174.6 80.0 to 174.6 108.0: event 1: side waits for main
arrow 355.8 108.0 to 355.8 80.0: event 2: main waits for side""",
        )
        words = [line.split(" ", 2)[2] for line in lines if line.startswith("text")]
        labels = ["0 us", "20 us", "main", "side", "3 mm", "6 sin", "7 add", "5 relu", "memory", "12.0 KiB", "0"]
        for word in (*labels, "net.py:3", "a = x @ w", "1 x, 10.0 us"):
            self.assertIn(word, words)
        self.assertEqual(words[-1], "Times are estimates, for a device that never waits for the host.")

    def test_text_at_the_width_of_a_phone_and_on_dark_pages(self) -> None:
        """At 400 pixels no text has less than 9, and both schemes have contrast."""
        svg = fork_and_join().timeline().svg()
        page = Diagnosis("t", "gpu", False, 0.5, None, None, ()).to_html()
        self.assertLessEqual(float(ET.fromstring(svg).get("viewBox", "").split()[2]), 400)
        for text in (svg, page):
            self.assertGreaterEqual(min(map(float, re.findall(r"font(?:-size)?: ([\d.]+)px", text))), 9.0)
            self.assertNotRegex(text, r"font-size=|font(?:-size)?: (?!\d+px)")
            style = re.search(r"<style>(.*)</style>", text, re.DOTALL)[1]
            light, _, dark = style.partition("@media (prefers-color-scheme: dark) {")
            for css, paper in ((light, "#ffffff"), (dark.partition("}\n}" if text is svg else "\n")[0], "#14171b")):
                found = re.findall(r"(?:text|\.quiet|\.end) { fill: (#\w{6})|--(?:in|out): (#\w{6})", css)
                self.assertEqual(len(found), 3 if text is svg else 2)
                for colour in map("".join, found):
                    self.assertGreaterEqual(contrast(colour, paper), 4.5, colour)
        self.assertRegex(svg, r"(?s)\.paper { fill: #ffffff; }.*dark.*\.paper { fill: #14171b; }")

    def test_collision_is_seen(self) -> None:
        text = '<text x="10" y="20">one</text><text x="20" y="24">two</text><text x="40" y="20">three</text>'
        self.assertEqual(collisions(f'<svg xmlns="http://www.w3.org/2000/svg">{text}</svg>'), [("two", "one")])

    def test_no_two_labels_of_300_kernels_collide(self) -> None:
        for streams in (1, 4, 9):
            found = many_kernels(300, streams)
            svg = found.svg()
            self.assertEqual(collisions(svg), [])
            boxes = label_boxes(svg)
            self.assertTrue(all(left >= 0 and right <= WIDTH for left, _, right, _, _ in boxes))
            (dropped,) = re.findall(r"(\d+) boxes are too narrow", svg) or ["0"]
            self.assertLess(int(dropped), 75, f"on {streams} streams")  # of 324

    def test_every_box_is_there_and_within_the_picture(self) -> None:
        found = many_kernels(300)
        root = ET.fromstring(found.svg())
        height = float(root.get("height", 0))
        titles = [e for e in root.iter() if e.tag.endswith("}title") and "from" in (e.text or "")]
        self.assertGreaterEqual(len(titles), len(found.slices))
        for rect in (e for e in root.iter() if e.tag.endswith("}rect")):
            left, top = float(rect.get("x", 0)), float(rect.get("y", 0))
            self.assertLessEqual(left + float(rect.get("width", 0)), WIDTH)
            self.assertLessEqual(top + float(rect.get("height", 0)), height)

    def test_widths_are_times(self) -> None:
        root = ET.fromstring(fork_and_join().timeline().svg())
        widths = [float(g[1].get("width", 0)) for g in root.iter() if g.tag.endswith("}g")]
        room = WIDTH - LEFT - MARGIN
        for width, us in zip(widths, (10, 5, 4, 20)):
            self.assertAlmostEqual(width, room * us / 34, delta=0.1)

    def test_text_that_xml_has_no_place_for(self) -> None:
        p = Program()
        p.run("a" + "".join(map(chr, (*range(32), 0xD800, 0xDFFF, 0xFFFE, 0x1F600))) + "b", "main", 1.0)
        titles = [e.text or "" for e in ET.fromstring(p.timeline().svg().encode()).iter() if e.tag.endswith("}title")]
        self.assertTrue(any(re.search("^a\ufffd.*\U0001f600b", text, re.DOTALL) for text in titles), titles)

    def test_text_is_escaped(self) -> None:
        p = Program()
        p.run("a<b", "main", 1.0, "x.py:1: if a < b & c:")
        ET.fromstring(p.timeline().svg())

    def test_same_number_in_two_files_is_told_apart(self) -> None:
        p = Program()
        for file, number in (("a.py", 3), ("b.py", 3), ("b.py", 4)):
            p.run("mm", "main", 50.0, f"{file}:{number}: x")
        texts = [text for *_, text in label_boxes(p.timeline().svg())]
        for label in ("a.py:3 mm", "b.py:3 mm", "4 mm"):
            self.assertIn(label, texts)

    def test_what_no_kernel_hides_is_red(self) -> None:
        p = Program()
        p.run("mm", "main", 5.0)
        p.run("aten.copy_.default", "side", 20.0, kind=TO_HOST, nbytes=1 << 20)
        svg = p.timeline().svg()
        red = [e for e in ET.fromstring(svg).iter() if e.get("fill") == "#d62728"]
        self.assertAlmostEqual(float(red[0].get("width", 0)), (WIDTH - LEFT - MARGIN) * 15 / 20, delta=0.1)
        self.assertIn("25% hidden behind kernels", svg)

    def test_empty_timeline(self) -> None:
        ET.fromstring(Program().timeline().svg())
        self.assertEqual(events(Program().timeline()), [])


# ---- for Perfetto


def complaints(trace: Any) -> list[str]:
    """What Perfetto's importer of Chrome traces would drop, move, or count as an error."""
    found = []
    open_flows: dict[tuple[str, Any], str] = {}
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    last = float("-inf")
    for e in trace["traceEvents"]:
        missing = {"ph", "pid", "tid", "name"} - e.keys()
        if missing:
            found.append(f"{e} has no {missing}")
        if e["ph"] == "M":
            continue
        if e["ts"] < last:
            found.append(f"{e['name']} is out of order")
        last = e["ts"]
        if round(e["ts"], 3) != e["ts"]:
            found.append(f"{e['name']} is at a part of a nanosecond")
        if e["ph"] == "X":
            if not e["dur"] > 0:
                found.append(f"{e['name']} takes no time")
            tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], round(e["ts"] + e["dur"], 3)))
        elif e["ph"] == "C":
            if not all(isinstance(v, (int, float)) for v in e["args"].values()):
                found.append(f"{e} counts what is no number")
        elif e["ph"] in "sf":
            if not any(a <= e["ts"] < b for a, b in tracks.get((e["pid"], e["tid"]), [])):
                found.append(f"flow {e['id']} {e['ph']} is in no slice")
            if e["ph"] == "s":
                if (e["cat"], e["id"]) in open_flows:
                    found.append(f"flow {e['id']} starts twice")
                open_flows[e["cat"], e["id"]] = e["name"]
            elif open_flows.pop((e["cat"], e["id"]), None) != e["name"]:
                found.append(f"flow {e['id']} ends and never started")
            elif e.get("bp") != "e":
                found.append(f"flow {e['id']} would end in the next slice")
        else:
            found.append(f"{e['ph']} is none of ours")
    for track, spans in tracks.items():
        spans.sort()
        found += [f"slices of {track} overlap at {b[0]}" for a, b in zip(spans, spans[1:]) if b[0] < a[1]]
    return [*found, *(f"flow {key} never ends" for key in open_flows)]


class TestPerfetto(TestCase):
    def test_small(self) -> None:
        trace = json.loads(fork_and_join().timeline().json())
        rows = [
            " ".join(str(e.get(k, "")) for k in ("ph", "pid", "tid", "ts", "dur", "name") if e.get(k, "") != "")
            for e in trace["traceEvents"]
        ]
        self.assertExpectedInline(
            "\n".join(rows),
            """\
M 10 0 process_name
M 10 1 thread_name
M 10 1 thread_sort_index
M 10 2 thread_name
M 10 2 thread_sort_index
X 10 1 0.0 10.0 net.py:3 mm
C 10 0 0.0 memory
s 10 1 9.999 event 1
X 10 2 10.0 20.0 net.py:5 relu
X 10 1 10.0 5.0 net.py:6 sin
f 10 2 10.0 event 1
C 10 0 10.0 memory
s 10 2 29.999 event 2
X 10 1 30.0 4.0 net.py:7 add
f 10 1 30.0 event 2
C 10 0 34.0 memory""",
        )
        self.assertEqual(complaints(trace), [])

    def test_large(self) -> None:
        found = many_kernels(300)
        trace = json.loads(found.json())
        self.assertEqual(complaints(trace), [])
        kinds = [e["ph"] for e in trace["traceEvents"]]
        self.assertEqual(kinds.count("X"), len(found.slices))
        self.assertGreater(kinds.count("s"), 20)

    def test_clocks_that_disagree_by_a_little_overlap_nothing(self) -> None:
        slices = [Slice(0, 0.0, 5.0004, "a"), Slice(0, 5.0001, 0.0, "b"), Slice(0, 5.0002, 3.0, "c")]
        trace = json.loads(Timeline("t", (Lane("main"),), tuple(slices)).json())
        self.assertEqual(complaints(trace), [])

    def test_validator_sees_what_is_wrong(self) -> None:
        good = json.loads(fork_and_join().timeline().json())
        for spoil, complaint in (
            (lambda e: e.pop("bp", None), "would end in the next slice"),
            (lambda e: e.update(id=99) if e["ph"] == "f" else None, "never started"),
            (lambda e: e.update(dur=1000.0) if "dur" in e else None, "overlap"),
            (lambda e: e.update(ts=0.0) if e["ph"] == "C" else None, "out of order"),
        ):
            bad = json.loads(json.dumps(good))
            for event in bad["traceEvents"]:
                spoil(event)
            self.assertTrue([c for c in complaints(bad) if complaint in c], complaint)

    def test_suffix_that_is_neither(self) -> None:
        with self.assertRaisesRegex(ValueError, "saved as .svg or .json, and x.png is neither"):
            fork_and_join().timeline().save("x.png")


# ---- simulated runs


def three_branches(streams: list[Any]) -> Any:
    def fn(x: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        results = []
        for number, stream in enumerate(streams):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                results.append((x.sin() * number) @ x if number else (x.cos() @ x).relu())
        for stream in streams:
            current.wait_stream(stream)
        return (results[0] + results[1]).exp() @ results[2]

    return fn


def square(side: int = 2048, **kwargs: Any) -> torch.Tensor:
    return torch.randn(side, side, device="cuda", **kwargs)


LINE_OF_A_COPY = 'ready.append((batch.to("cuda", non_blocking=True), side.record_event()))'


class TestSimulated(TestCase):
    @simulated_gpu()
    def test_branches_run_side_by_side_and_are_joined(self) -> None:
        found = timeline(forked(torch.cuda.Stream()), square(), square(), fullgraph=True)
        self.assertEqual([lane.name for lane in found.lanes], ["default stream", "stream 1"])
        self.assertGreater(found.overlap.fraction, 0.3)
        by_name = {(s.name, found.lanes[s.lane].name): s for s in found.slices}
        relu, last = by_name["relu", "stream 1"], found.slices[-1]
        self.assertIn("a = (x @ w).relu()", relu.line)
        self.assertEqual((last.name, found.lanes[last.lane].name), ("mm", "default stream"))
        self.assertGreaterEqual(last.start, relu.end)
        self.assertEqual(complaints(json.loads(found.json())), [])
        self.assertEqual(collisions(found.svg()), [])
        self.assertTrue(found.simulated)

    @simulated_gpu()
    def test_time_of_a_matmul_is_that_of_its_arithmetic(self) -> None:
        def mm(x: torch.Tensor) -> torch.Tensor:
            return x @ x

        small, large = (timeline(mm, square(n, dtype=torch.bfloat16)) for n in (4096, 8192))
        self.assertAlmostEqual(large.end / small.end, 8, delta=0.01)

    @simulated_gpu()
    def test_time_of_a_pointwise_kernel_is_that_of_its_bytes(self) -> None:
        from torch_overlay._functorch.device_peaks import bytes_per_us

        found = timeline(lambda x: x.sin() + 1, square(4096))
        self.assertAlmostEqual(found.end, 2 * 4096 * 4096 * 4 / (0.8 * bytes_per_us(0)), delta=0.01)

    @simulated_gpu()
    def test_gather_reads_what_it_takes_and_not_the_table(self) -> None:
        table, rows = torch.randn(1 << 18, 256, device="cuda"), torch.zeros(512, dtype=torch.int64, device="cuda")
        found = timeline(lambda t, r: t[r] * 2, table, rows)
        self.assertLess(found.end, 10)  # the whole table takes 70

    @simulated_gpu()
    def test_backward_runs_on_the_streams_of_the_forward(self) -> None:
        found = timeline(
            forked(torch.cuda.Stream()), square(requires_grad=True), square(requires_grad=True), backward=True
        )
        self.assertGreater(sum(found.lanes[s.lane].name == "stream 1" for s in found.slices), 2)
        self.assertGreater(found.peak, 0)

    @simulated_gpu()
    def test_several_calls_repeat(self) -> None:
        one, three = (timeline(forked(torch.cuda.Stream()), square(), square(), calls=n) for n in (1, 3))
        self.assertEqual(len(three.slices), 3 * len(one.slices))
        self.assertAlmostEqual(three.end, 3 * one.end, delta=0.01)

    @simulated_gpu()
    def test_region_that_gets_a_graph_is_drawn_as_it_runs_without(self) -> None:
        side = torch.cuda.Stream()
        plain, graph = (timeline(forked(side), square(), square(), mode=mode) for mode in (None, "reduce-overhead"))
        self.assertEqual([s.name for s in graph.slices], [s.name for s in plain.slices])
        self.assertAlmostEqual(graph.end, plain.end, delta=0.01)

    @simulated_gpu()
    def test_item_keeps_the_host_waiting(self) -> None:
        def fn(x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            y.cpu()
            return y + 1

        found = timeline(torch.compiler.disable(fn), square(), compile=False)
        self.assertIn("host", [lane.name for lane in found.lanes])
        self.assertEqual([s.kind for s in found.copies], [TO_HOST])
        self.assertEqual(found.copies[0].hidden, 0.0)

    @simulated_gpu()
    def test_copies_to_the_device_are_copies_pinned_or_not(self) -> None:
        for pin in (True, False):
            host = torch.randn(1 << 20, pin_memory=pin)
            fn = torch.compiler.disable(lambda h: h.to("cuda", non_blocking=True).sin())
            found = timeline(fn, host, compile=False)
            (copy,) = found.copies
            self.assertEqual((copy.kind, copy.nbytes), (FROM_HOST, 4 << 20))
            self.assertAlmostEqual(copy.duration, 8 + (4 << 20) / 45e3, delta=0.01)

    @simulated_gpu()
    def test_copies_of_a_prefetch_loop_have_their_own_lines(self) -> None:
        """Nothing stands above them in generated code, whether in a function of their own or not."""

        def fn(batches: list[torch.Tensor], w: torch.Tensor) -> torch.Tensor:
            total, ready = torch.zeros((), device="cuda"), []
            for batch in batches:
                with torch.cuda.stream(side):
                    ready.append((batch.to("cuda", non_blocking=True), side.record_event()))
            for x, event in ready:
                torch.cuda.current_stream().wait_event(event)
                total = total + torch.relu(x @ w).sum()
            return total

        side, w = torch.cuda.Stream(), square(64)
        batches = [torch.randn(64, 64, pin_memory=True) for _ in range(6)]
        for mode in (None, "reduce-overhead"):
            found = timeline(fn, batches, w, mode=mode)
            self.assertEqual([s.line.partition(": ")[2] for s in found.copies], [LINE_OF_A_COPY] * 6)

    @simulated_gpu()
    def test_kernels_of_a_module_of_torch_have_its_path(self) -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Sequential(nn.Linear(64, 8))).cuda()
        found = timeline(model, square(64), backward=True)
        lines = [own_line(s.line) for s in found.slices if "ones_like" not in s.symbol]
        self.assertEqual({*lines}, {"0 (Linear)", "1 (ReLU)", "2.0 (Linear)"})

    @simulated_gpu()
    def test_backward_without_anything_to_differentiate(self) -> None:
        with self.assertRaisesRegex(ValueError, "no output requires a gradient"):
            timeline(lambda x: x + 1, square(), backward=True)

    def test_calls_are_at_least_one(self) -> None:
        with self.assertRaisesRegex(ValueError, "calls must be at least 1, got 0"):
            timeline(lambda: None, calls=0)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()


class TestOffload(TestCase):
    @simulated_gpu()
    def test_copies_are_on_lanes_of_their_own_with_line_and_hidden_part(self) -> None:
        model, x = Layers().to("cuda"), torch.randn(8192, 1024, device="cuda")
        with config.patch(activation_offload={"budget_gb": 0.16}):
            found = timeline(model, x, backward=True)
        out = [s for s in found.copies if s.kind == TO_HOST]
        back = [s for s in found.copies if s.kind == FROM_HOST]
        self.assertTrue(out)
        self.assertEqual(sorted(s.nbytes for s in out), sorted(s.nbytes for s in back))
        self.assertEqual(sorted(s.line for s in out), sorted(s.line for s in back))
        self.assertTrue(all("x = layer(x).relu()" in s.line for s in out), out)
        names = {found.lanes[s.lane].name.partition(", ")[2] for s in found.copies}
        self.assertEqual(names, {"to the host", "from the host"})
        self.assertTrue(all(s.hidden is not None and 0 <= s.hidden <= 1 for s in found.copies))
        self.assertIn("hidden", str(found))
        without = timeline(Layers().to("cuda"), x, backward=True)
        self.assertLess(found.peak, without.peak)

    def test_tensor_of_another_slab_is_not_named(self) -> None:
        p = Program()
        slab, x = p.trace.alloc("slab", 999, HOST), p.trace.alloc("x", 512, "main")
        p.run("aten.copy_.default", "main", 1.0, reads=[x], writes=[slab[0:512]])
        report = mock.Mock(rows=[mock.Mock(nbytes=512, stack_trace="")])
        report.rows[0].name = "mm"
        self.assertEqual(saved_tensors(p.trace.operations, [report]), {})


# ---- profiles


def kineto() -> dict[str, Any]:
    """What the profiler exports of two calls: kernels of two streams, a copy, an event, memory, a compiled graph."""
    found: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}}]

    def host(cat: str, name: str, ts: float, dur: float, **args: Any) -> None:
        found.append({"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": 7, "ts": ts, "dur": dur, "args": args})

    def device(cat: str, name: str, ts: float, dur: float, stream: int, correlation: int, **args: Any) -> None:
        given = {"device": 0, "stream": stream, "correlation": correlation, **args}
        found.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": given}
        )

    host("user_annotation", "## Call CompiledFxGraph fabc ##", 1000, 100)
    host("cpu_op", "triton_poi_fused_sin_0", 1010, 8)
    host("cuda_driver", "cuLaunchKernel", 1012, 4, correlation=11)
    host("cpu_op", "aten::mm", 1030, 10)
    host("cuda_runtime", "cudaLaunchKernel", 1032, 4, correlation=14)
    host("cpu_op", "aten::mm", 1050, 10)
    host("cuda_runtime", "cudaMemsetAsync", 1051, 2, correlation=16)
    host("cuda_runtime", "cudaLaunchKernel", 1055, 4, correlation=17)
    host("cpu_op", "aten::mm", 1200, 10)  # of eager code after the call
    host("cuda_runtime", "cudaLaunchKernel", 1202, 4, correlation=30)
    device("kernel", "triton_poi_fused_sin_0", 1020.5, 20, 7, 11)
    waited = {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 12, "wait_on_cuda_event_id": 3}
    device("cuda_sync", "Stream Wait Event", 1026, 1, 13, 13, **waited)
    device("kernel", "nvjet_hsh_128x128", 1042, 30, 13, 14)
    device("gpu_memset", "Memset (Device)", 1060, 1, 7, 16)
    device("kernel", "nvjet_hsh_64x64", 1062, 10, 7, 17)
    device("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1062, 20, 17, 18, bytes=4096)
    device("kernel", "nvjet_hsh_64x64", 1210, 10, 7, 30)
    for ts, total in ((990, 100), (1035, 300), (1300, 200)):
        given = {"Total Allocated": total, "Device Type": 1, "Device Id": 0, "Bytes": 1}
        found.append(
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": ts, "pid": 7, "tid": 7, "args": given}
        )
    return {"schemaVersion": 1, "traceEvents": found}


WRAPPER = """
    def call(self, args):
        # Topologically Sorted Source Nodes: [sin], Original ATen: [aten.sin]
        triton_poi_fused_sin_0.run(arg0_1, buf0, 4096, stream=stream0_raw)
        # Topologically Sorted Source Nodes: [y], Original ATen: [aten.mm]
        extern_kernels.mm(buf0, arg1_1, out=buf1)
        # Topologically Sorted Source Nodes: [z], Original ATen: [aten.mm]
        extern_kernels.mm(buf1, arg1_1, out=buf2)
"""
LINES = {"sin": "net.py:4: x = x.sin()", "y": "net.py:5: y = x @ w", "z": "net.py:6: z = y @ w"}


def compiled(wrapper: str = WRAPPER) -> Any:
    lines, line = [], ""
    for row in wrapper.split("\n"):
        if match := re.search(r"Source Nodes: \[(\w+)\]", row):
            line = LINES[match[1]]
        lines.append(line)
    return mock.Mock(regions=[mock.Mock(wrapper=wrapper, lines=lines)], began_ns=0)


class TestProfile(TestCase):
    def test_streams_are_lanes_and_time_starts_with_the_first_kernel(self) -> None:
        found = of_trace(kineto())
        self.assertEqual([lane.name for lane in found.lanes], ["stream 7", "stream 13", "stream 17, to the host"])
        self.assertEqual((found.slices[0].start, found.slices[0].name), (0.0, "sin"))
        self.assertFalse(found.simulated)
        self.assertEqual(complaints(json.loads(found.json())), [])
        self.assertEqual(collisions(found.svg()), [])

    def test_lines_of_compiled_kernels_and_none_for_others(self) -> None:
        found = of_trace(kineto(), compiled())
        rows = [(s.symbol, s.name, s.line[:8]) for s in found.slices]
        expected = [
            ("triton_poi_fused_sin_0", "sin", "net.py:4"),
            ("nvjet_hsh_128x128", "mm", "net.py:5"),
            ("Memset (Device)", "mm", "net.py:6"),
            ("nvjet_hsh_64x64", "mm", "net.py:6"),
            ("Memcpy DtoH (Device -> Pinned)", "copy to the host", ""),
            ("nvjet_hsh_64x64", "mm", ""),
        ]
        self.assertEqual(rows, expected)

    def test_sequence_that_is_not_that_of_the_module_has_no_guessed_lines(self) -> None:
        found = of_trace(kineto(), compiled(WRAPPER + "        extern_kernels.addmm(a, b, c)\n"))
        lines = [s.line[:8] for s in found.slices]
        self.assertEqual(lines, ["net.py:4", "", "", "", "", ""])  # the name of a Triton kernel is enough

    def test_wait_is_an_arrow(self) -> None:
        found = of_trace(kineto())
        (arrow,) = found.arrows
        symbols = [s.symbol for s in found.slices]
        self.assertEqual(symbols[arrow.source], "triton_poi_fused_sin_0")
        self.assertEqual((symbols[arrow.target], arrow.name), ("nvjet_hsh_128x128", "event 3"))

    def test_wait_whose_record_the_profiler_does_not_know_is_that_of_the_generated_code(self) -> None:
        trace = kineto()
        for event in trace["traceEvents"]:
            if event.get("cat") == "cuda_sync":
                event["args"].update(wait_on_stream=-1, wait_on_cuda_event_record_corr_id=-1)
        self.assertEqual(of_trace(trace).arrows, ())
        mm = "triton_tem_fused_mm_2"
        module = WRAPPER.replace("extern_kernels.mm(buf0, arg1_1, out=buf1)", f"{mm}.run(buf1, stream=stream1_raw)")
        rows = module.splitlines()
        rows[4:4] = ["        ev0.record(stream0_raw)", "        if multi_stream: ev0.wait(stream1_raw)"]
        for event in trace["traceEvents"]:
            if event.get("name") == "nvjet_hsh_128x128" or (event.get("name") == "aten::mm" and event["ts"] == 1030):
                event["name"] = mm
        found = of_trace(trace, compiled("\n".join(rows)))
        symbols = [s.symbol for s in found.slices]
        (arrow,) = found.arrows
        self.assertEqual((symbols[arrow.source], symbols[arrow.target]), ("triton_poi_fused_sin_0", mm))
        self.assertEqual(complaints(json.loads(found.json())), [])

    def graph(self) -> tuple[Any, dict[str, Any]]:
        """A compiled program, and a profile of its CUDA graph: its kernels by stream, all of one launch."""
        with simulated_gpu():
            seen = compile_only(three_branches([torch.cuda.Stream() for _ in range(3)]), square(256))
        (rows,) = functions(seen.wrappers[0], seen.regions[0].lines)
        found: list[dict[str, Any]] = []
        streams: list[str] = []
        for at, row in enumerate(r for r in rows if r.kind == "launch"):
            streams += [row.stream] if row.stream not in streams else []
            symbol = row.name if row.name.startswith("triton_") else f"nvjet_{at}"
            given = {"device": 0, "stream": 40 - streams.index(row.stream), "correlation": 5}
            event = {"ph": "X", "cat": "kernel", "name": symbol, "pid": 0, "tid": given["stream"], "args": given}
            found.append({**event, "ts": 10 + at, "dur": 1})
        launch = {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "pid": 7, "tid": 7, "args": {"correlation": 5}}
        return seen, {"traceEvents": [*found, {"ph": "X", "ts": 1, "dur": 2, **launch}]}

    def test_kernels_of_a_graph_have_lines_and_arrows(self) -> None:
        seen, trace = self.graph()
        found = of_trace(trace, seen)
        self.assertEqual([s.symbol for s in found.slices if not s.line], [])
        for s in found.slices:
            if s.symbol.startswith("nvjet"):
                self.assertEqual(s.name, "mm")
                self.assertIn("@", s.line)
        joined = {found.lanes[a.source_lane].name for a in found.arrows}
        self.assertEqual(len(joined), 3)  # the branches fork from where the graph begins
        self.assertEqual(complaints(json.loads(found.json())), [])

    def test_graph_with_a_kernel_that_the_code_does_not_have_has_no_guessed_lines(self) -> None:
        seen, trace = self.graph()
        extra = next(e for e in trace["traceEvents"] if e["name"].startswith("nvjet"))
        trace["traceEvents"].append({**extra, "ts": extra["ts"] + 0.5, "name": "triton_poi_fused_other_0"})
        found = of_trace(trace, seen)
        self.assertEqual({s.line for s in found.slices if s.symbol.startswith("nvjet")}, {""})
        self.assertEqual(found.arrows, ())

    def test_copy_is_hidden_by_the_kernels_beside_it(self) -> None:
        (copy,) = of_trace(kineto()).copies
        self.assertEqual((copy.kind, copy.nbytes, copy.hidden), (TO_HOST, 4096, 0.5))

    def test_copies_of_saved_activations_are_named_where_their_sizes_are_those_of_the_schedule(self) -> None:
        stack = '  File "/home/me/net.py", line 8, in forward\n    y = f(x)\n'
        for nbytes, expected in (
            (4096, ("copy to the host relu", "net.py:8: y = f(x)")),
            (99, ("copy to the host", "")),
        ):
            seen = mock.Mock(regions=[mock.Mock(wrapper=None)], offloads=[mock.Mock()], began_ns=0)
            seen.regions[0].copies = log.CopySchedule(False, 9, (("relu", 3, 9),))
            seen.offloads[0].rows = [log.OffloadedTensor("relu", nbytes, stack)]
            (copy,) = of_trace(kineto(), seen).copies
            self.assertEqual((copy.name, copy.line), expected)

    def test_work_before_the_first_compiled_call_is_left_out(self) -> None:
        trace = {**kineto(), "baseTimeNanoseconds": 5_000_000}
        seen = compiled()
        seen.began_ns = 5_000_000 + 1_042_000
        found = of_trace(trace, seen)
        self.assertEqual([s.symbol for s in found.slices][:2], ["nvjet_hsh_128x128", "Memset (Device)"])
        self.assertEqual(found.slices[0].start, 0.0)

    def test_memory_is_the_allocators(self) -> None:
        found = of_trace(kineto())
        self.assertEqual(found.memory, ((0.0, 100), (14.5, 300), (found.end, 200)))

    def test_exported_file(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            path.write_text(json.dumps(kineto()))
            self.assertEqual(len(Timeline.from_profile(path).slices), 6)

    def test_profile_without_a_device_says_what_to_do(self) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
            torch.ones(4).sin()
        with self.assertRaisesRegex(ValueError, "the profile has no kernels: record it with ProfilerActivity.CUDA"):
            Timeline.from_profile(found)

    def test_code_that_was_compiled_before_is_noted(self) -> None:
        found = of_trace(kineto(), mock.Mock(regions=[], offloads=[], began_ns=0))
        self.assertIn("was compiled before", found.notes[-1])

    def test_missing_synchronisation_events_are_noted(self) -> None:
        trace = kineto()
        trace["traceEvents"] = [e for e in trace["traceEvents"] if e.get("cat") != "cuda_sync"]
        found = of_trace(trace)
        self.assertEqual(found.arrows, ())
        self.assertIn("no arrows", found.notes[-1])


# ---- the command line


PROGRAM = """\
import torch

side = torch.cuda.Stream()


def branch_inputs():
    return torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda")


def branch(x, y):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        a = x @ y
    b = y @ y
    torch.cuda.current_stream().wait_stream(side)
    return a * b


def make():
    return branch, branch_inputs()


def fails(x=None):
    raise ValueError("not like this")
"""


class TestCommand(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.path = self.folder / "program.py"
        self.path.write_text(PROGRAM)

    def command(self, *argv: str) -> tuple[int, str, str]:
        return printed(commands.main, ["timeline", "--simulate", *argv])

    def test_function_and_file_with_make(self) -> None:
        for target in (f"{self.path}:branch", str(self.path)):
            svg, trace = self.folder / "new" / "x.svg", self.folder / "x.json"
            status, out, err = self.command(target, "--out", str(svg), "--out", str(trace))
            self.assertEqual((status, err), (0, f"wrote {svg}\nwrote {trace}\n"))
            self.assertIn("3 kernels, 2 streams", out)
            self.assertIn("program.py:13", svg.read_text())
            self.assertEqual(complaints(json.loads(trace.read_text())), [])

    def test_errors_are_one_line(self) -> None:
        for argv, message in (
            (["no.py:f"], "timeline: no file no.py"),
            ([f"{self.path}:none"], f"timeline: {self.path} has no function none"),
            ([f"{self.path}:branch", "--out", "x.png"], "timeline: --out x.png: timeline writes .svg or .json"),
            ([f"{self.path}:branch", "--calls", "0"], "timeline: --calls must be at least 1, got 0"),
            ([f"{self.path}:branch", "--devices", "9"], "timeline: --devices must be 1 to 8, got 9"),
        ):
            self.assertEqual(self.command(*argv), (2, "", message + "\n"))

    def test_function_without_parameters_gets_no_inputs(self) -> None:
        self.path.write_text("def f(): return 5\ndef g(x=1): return x\ndef example_inputs(): return 2\n")
        found = {name: program.load(str(self.path), name)[1] for name in ("f", "g")}
        self.assertEqual(found, {"f": (), "g": (2,)})

    def test_make_that_returns_something_else(self) -> None:
        self.path.write_text("def make(): return print\n")
        message = f"timeline: make() of {self.path} returned no pair of a function and its arguments\n"
        self.assertEqual(self.command(str(self.path)), (2, "", message))

    def test_picture_that_cannot_be_written_loses_nothing(self) -> None:
        blocked = self.path / "x.svg"  # in a file
        status, out, err = self.command(f"{self.path}:branch", "--out", str(blocked))
        self.assertEqual(status, 2)
        self.assertIn("3 kernels, 2 streams", out)
        self.assertRegex(err, r"^timeline: --out .* could not be written: .*\n$")

    def test_program_that_fails(self) -> None:
        status, _, err = self.command(f"{self.path}:fails")
        self.assertEqual(status, 2)
        self.assertRegex(err, r"program\.py:\d+: ValueError: not like this\n$")


@form.needs_gpu
class TestGpu(TestCase):
    def test_profile_has_streams_lines_events_and_memory(self) -> None:
        found = timeline(forked(torch.cuda.Stream()), square(), square(), fullgraph=True)
        self.assertFalse(found.simulated)
        self.assertEqual(len({s.lane for s in found.slices}), 2)
        self.assertTrue(found.arrows, found.notes)
        self.assertTrue(found.memory)
        unknown = [s.symbol for s in found.slices if s.kind == KERNEL and not s.line]
        self.assertEqual(unknown, [])
        self.assertEqual(complaints(json.loads(found.json())), [])
        self.assertEqual(collisions(found.svg()), [])

    def test_relaunched_graph_has_its_kernels(self) -> None:
        found = timeline(forked(torch.cuda.Stream()), square(), square(), mode="reduce-overhead")
        self.assertGreaterEqual(sum(s.kind == KERNEL for s in found.slices), 5)
        self.assertEqual(complaints(json.loads(found.json())), [])

    def test_offloaded_step(self) -> None:
        model, x = Layers().to("cuda"), torch.randn(8192, 1024, device="cuda")
        with config.patch(activation_offload={"budget_gb": 0.16}):
            found = timeline(model, x, backward=True)
        self.assertEqual({s.kind for s in found.copies}, {TO_HOST, FROM_HOST})
        self.assertGreater(found.hidden or 0.0, 0.2)
        self.assertTrue(all("x = layer(x).relu()" in s.line for s in found.copies), found.copies)
