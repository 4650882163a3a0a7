"""The picture of a plan: what it promises about order, and that it can be read."""

from __future__ import annotations

import re
import unittest
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from typing import TYPE_CHECKING

import form  # noqa: F401
from torch_overlay._inductor.stream_planner import Buffer, HOST, Op, Plan, plan_streams
from torch_overlay.analysis.plan_svg import CHARACTER, lay_out, plan_svg, shorten, stream_name


if TYPE_CHECKING:
    from collections.abc import Iterable

SVG = "{http://www.w3.org/2000/svg}"


def op(name: str, stream: int | None, reads: str = "", writes: str = "", **kwargs) -> Op:
    return Op(name, stream, frozenset(reads.split()), frozenset(writes.split()), **kwargs)


def fork_and_join(branches: int = 3, length: int = 2) -> Plan:
    ops = [op("start", 0, "x", "a")]
    for branch in range(1, branches + 1):
        source = "a"
        for step in range(length):
            ops.append(op(f"b{branch}_{step}", branch, source, f"t{branch}_{step}"))
            source = f"t{branch}_{step}"
    ops.append(op("end", 0, " ".join(f"t{branch}_{length - 1}" for branch in range(1, branches + 1)), "out"))
    return plan_streams(ops, [Buffer("a", 0)])


@dataclass(frozen=True)
class Rectangle:
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Rectangle) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def rectangle(element: ET.Element) -> Rectangle:
    x, y, width, height = (float(element.get(name, "0")) for name in ("x", "y", "width", "height"))
    return Rectangle(x, y, x + width, y + height)


def extent(text: ET.Element) -> Rectangle:
    """Where a text stands, at the width of a character that the layout assumes."""
    width = CHARACTER * len(text.text or "") * (15 / 11 if text.get("class") == "title" else 1)
    x, y = float(text.get("x", "0")), float(text.get("y", "0"))
    left = x - {"start": 0.0, "middle": width / 2, "end": width}[text.get("text-anchor", "start")]
    return Rectangle(left, y - 9, left + width, y + 3)


def boxes(root: ET.Element) -> list[Rectangle]:
    return [rectangle(group.find(f"{SVG}rect")) for group in root.iter(f"{SVG}g")]


def segments(path: str) -> Iterable[Rectangle]:
    """The straight parts of an arrow; its corners lie between them."""
    x = y = 0.0
    for command, numbers in re.findall(r"([MHVQ])([-\d. ]+)", path):
        values = [float(n) for n in numbers.split()]
        if command == "H":
            yield Rectangle(min(x, values[0]), y, max(x, values[0]), y)
            x = values[0]
        elif command == "V":
            yield Rectangle(x, min(y, values[0]), x, max(y, values[0]))
            y = values[0]
        else:
            x, y = values[-2:]


class TestLayout(unittest.TestCase):
    def test_operations_that_may_run_together_share_a_column(self) -> None:
        layout = lay_out(fork_and_join(branches=3, length=2))
        self.assertEqual(list(layout.columns.values()), [0, 1, 2, 1, 2, 1, 2, 3])

    def test_operations_that_an_event_orders_never_share_a_column(self) -> None:
        plan = fork_and_join(branches=4, length=3)
        columns = lay_out(plan).columns
        for event in plan.events:
            for at, _ in event.waits:
                self.assertLess(columns[event.after], columns[at])

    def test_operations_of_one_stream_stand_in_launch_order(self) -> None:
        plan = plan_streams([op(f"op{i}", i % 2, "", f"b{i}") for i in range(6)])
        self.assertEqual(list(lay_out(plan).columns.values()), [0, 0, 1, 1, 2, 2])

    def test_what_is_launched_after_a_blocking_operation_stands_behind_it(self) -> None:
        plan = plan_streams([op("item", 1, "x", "n", blocking=True), op("next", 0, "", "y")])
        self.assertEqual(list(lay_out(plan).columns.values()), [0, 1])

    def test_operations_that_launch_nothing_are_not_drawn(self) -> None:
        plan = plan_streams([op("mm", 0, "x", "a"), op("view", None, "a", "b")])
        self.assertEqual(list(lay_out(plan).columns), [0])

    def test_host_comes_first_then_current_streams_then_side_streams(self) -> None:
        plan = plan_streams([op("a", 5), op("b", 1_000_001), op("c", 0), op("d", HOST)])
        self.assertEqual(
            [stream_name(s) for s in lay_out(plan).lanes], ["host", "current stream", "cuda:1 current", "stream 5"]
        )


class TestPicture(unittest.TestCase):
    def setUp(self) -> None:
        self.plan = fork_and_join(branches=4, length=3)
        long_names = {o.name: f"{o.name}_with+a+very+long+label" for o in self.plan.ops}
        self.root = ET.fromstring(plan_svg(self.plan, title="fork and join", labels=long_names))

    def test_every_wait_is_an_arrow(self) -> None:
        self.assertEqual(len(list(self.root.iter(f"{SVG}path"))) - 1, self.plan.num_waits)  # and the arrow's head

    def test_boxes_do_not_overlap(self) -> None:
        found = boxes(self.root)
        self.assertEqual(len(found), len(self.plan.ops))
        self.assertEqual([(a, b) for i, a in enumerate(found) for b in found[:i] if a.overlaps(b)], [])

    def test_labels_do_not_collide(self) -> None:
        found = [extent(text) for text in self.root.iter(f"{SVG}text")]
        self.assertEqual([(a, b) for i, a in enumerate(found) for b in found[:i] if a.overlaps(b)], [])

    def test_labels_stay_inside_their_boxes(self) -> None:
        for group in self.root.iter(f"{SVG}g"):
            box, text = rectangle(group.find(f"{SVG}rect")), extent(group.find(f"{SVG}text"))
            self.assertGreaterEqual(text.left, box.left)
            self.assertLessEqual(text.right, box.right)

    def test_no_arrow_crosses_a_box(self) -> None:
        found = boxes(self.root)
        for path in self.root.iter(f"{SVG}path"):
            if path.get("class") == "event":
                for part in segments(path.get("d", "")):
                    inner = Rectangle(part.left + 3, part.top + 1, part.right - 3, part.bottom - 1)
                    self.assertEqual([box for box in found if inner.overlaps(box)], [])

    def test_everything_lies_inside_the_picture(self) -> None:
        picture = rectangle(self.root)
        for shape in (*boxes(self.root), *(extent(text) for text in self.root.iter(f"{SVG}text"))):
            self.assertGreaterEqual(shape.left, picture.left)
            self.assertLessEqual(shape.right, picture.right)
            self.assertLessEqual(shape.bottom, picture.bottom)

    def test_whole_label_is_the_tooltip_of_a_box_that_is_too_small_for_it(self) -> None:
        tips = [group.find(f"{SVG}title").text for group in self.root.iter(f"{SVG}g")]
        self.assertEqual(tips[0], "0: start: start_with+a+very+long+label")

    def test_labels_with_markup_are_escaped(self) -> None:
        root = ET.fromstring(plan_svg(plan_streams([op("op0", 0)]), title="a < b", labels={"op0": "<b>&"}))
        self.assertIn("<b>&", [text.text for text in root.iter(f"{SVG}text")])

    def test_event_from_the_caller_is_drawn_at_the_operation_that_waits_for_it(self) -> None:
        plan = plan_streams([op("op0", 0, after=frozenset({"e5"}))])
        self.assertEqual(len(plan.boundary_waits), 1)
        self.assertIn("waits for the caller&#x27;s event 5", plan_svg(plan))

    def test_plan_without_operations_is_a_picture_too(self) -> None:
        ET.fromstring(plan_svg(Plan(())))

    def test_shortened_label_keeps_its_beginning(self) -> None:
        self.assertEqual(shorten("abcdefghij", CHARACTER * 5), "abcd…")
        self.assertEqual(shorten("abcde", CHARACTER * 5), "abcde")


if __name__ == "__main__":
    unittest.main()
