# Owner(s): ["module: inductor"]

import random
import textwrap

from torch._inductor.streams.memory_report import account, amount, describe
from torch._inductor.streams.plan import Buffer, HOST, Op, Plan
from torch.testing._internal.common_utils import run_tests, TestCase


MIB = 1 << 20


def plan_of(ops, buffers, release):
    uses = {
        b.name: frozenset(
            i for i, op in enumerate(ops) if b.name in op.reads | op.writes
        )
        for b in buffers
    }
    return Plan(tuple(ops), release=release, buffers=tuple(buffers), uses=uses)


def op(name, stream, reads="", writes=""):
    return Op(name, stream, frozenset(reads.split()), frozenset(writes.split()))


def late():
    """Stream 0 comes after g, which reads a, only where it takes g's result."""
    ops = [
        op("f", 0, "", "a"),
        op("g", 1, "a", "b"),
        op("h", 0, "", "c"),
        op("i", 0, "c", "d"),
        op("j", 0, "b d", "out"),
    ]
    sizes = {"a": 4, "b": 1, "c": 2, "d": 2, "out": 1}
    buffers = [
        Buffer(name, int(name == "b"), size=size * MIB, leaves=name == "out")
        for name, size in sizes.items()
    ]
    return plan_of(ops, buffers, {"a": 4, "b": 5})


class TestAccount(TestCase):
    def test_drawn_plans(self):
        rng, more = random.Random(0), 0
        for _ in range(500):
            count = rng.randrange(1, 12)
            buffers, release, alive, shared = [], {}, [0] * count, [0] * count
            names = {i: [] for i in range(count)}
            for b in range(rng.randrange(1, 6)):
                first = rng.randrange(count)
                uses = [first, min(first + rng.randrange(3), count - 1)]
                size, fresh = rng.randrange(1, 9), rng.random() < 0.9
                leaves = rng.random() < 0.1
                buffers.append(Buffer(f"b{b}", 0, fresh, size=size, leaves=leaves))
                if rng.random() < 0.5:
                    release[f"b{b}"] = rng.randrange(count + 1)
                for i in uses:
                    names[i].append(f"b{b}")
                for i in range(uses[0] if fresh else 0, count):
                    is_used = leaves or i <= uses[-1]
                    shared[i] += size if is_used else 0
                    alive[i] += size if is_used or i < release.get(f"b{b}", 0) else 0
            ops = [op(f"o{i}", 0, " ".join(names[i])) for i in range(count)]
            found = account(plan_of(ops, buffers, release))
            self.assertEqual(found.peak, max(alive))
            self.assertEqual(found.peak_on_one_stream, max(shared))
            more += found.peak > found.peak_on_one_stream
        self.assertGreater(more, 50)

    def test_buffer_that_is_held_until_its_stream_is_behind_the_reader(self):
        found = account(late())
        self.assertEqual(found.peak_on_one_stream, 5 * MIB)  # a and b; or b, c and d
        self.assertEqual(found.peak, 9 * MIB)  # a until j, and b, c and d
        held = [(h.name, h.last, h.reader, h.until) for h in found.held]
        self.assertEqual(held, [("a", 1, 1, 4)])

    def test_text(self):
        self.assertExpectedInline(
            "\n".join(textwrap.fill(line, 76) for line in describe(late())),
            """\
Memory: 9.0 MiB at the peak, 4.0 MiB more than in the same order on one
stream.
  a, 4.0 MiB of stream 0, is used last by 1 (g) on stream 1, and freed
before 4 (j), where stream 0 is behind it""",
        )

    def test_plan_of_one_stream_has_nothing_to_report(self):
        ops = [op("f", 0, "", "a"), op("read", HOST, "a")]
        self.assertEqual(describe(plan_of(ops, [Buffer("a", 0, size=MIB)], {})), [])

    def test_the_largest_are_listed(self):
        names = [f"a{i}" for i in range(12)]
        ops = [op("f", 0, "", " ".join(names)), op("g", 1, " ".join(names))]
        buffers = [Buffer(n, 0, size=(12 - i) * MIB) for i, n in enumerate(names)]
        lines = describe(plan_of([*ops, op("h", 0)], buffers, dict.fromkeys(names, 3)))
        self.assertEqual(len(lines), 12)
        self.assertIn("freed at the exit", lines[1])
        self.assertEqual(lines[-1], "  and 2 more buffers, 3.0 MiB")

    def test_amounts(self):
        found = [amount(n) for n in (12, 1536, 3 << 20, 5 << 40)]
        self.assertEqual(found, ["12 B", "1.5 KiB", "3.0 MiB", "5120.0 GiB"])


if __name__ == "__main__":
    run_tests()
