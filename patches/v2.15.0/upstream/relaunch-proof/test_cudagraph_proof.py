# Owner(s): ["module: inductor"]

import dataclasses

from torch._inductor.cudagraph_relaunch.nodes import (
    CapturedGraph,
    KernelNode,
    PointerSlot,
    Refusal,
    Segment,
)
from torch._inductor.cudagraph_relaunch.prove import prove
from torch.testing._internal.common_utils import run_tests, TestCase


LOW, SPAN = (0x2C15A600000, 0x3C15A600000), 1 << 30


def u64(*values):
    return b"".join(value.to_bytes(8, "little") for value in values)


def kernel(index, *values, **changes):
    offsets = [sum(map(len, values[:i])) for i in range(len(values))]
    parameters = tuple(zip(offsets, values))
    node = KernelNode(
        index, index, "kernel", 7, 0, 0, (1, 1, 1), (32, 1, 1), 0, parameters
    )
    return dataclasses.replace(node, **changes)


class TestProof(TestCase):
    def capture(self, build, which):
        """build(at) makes the nodes; at(region, delta) is the address of a byte."""
        gap = (which + 1) << 16
        segments = [Segment(LOW[which] + gap * (r + 1), 4096, r) for r in range(3)]
        at = lambda region, delta=0: segments[region].address + delta  # noqa: E731
        nodes = tuple(build(at, which))
        high = LOW[which] + SPAN
        return CapturedGraph(nodes, (), tuple(segments), LOW[which], high)

    def prove(self, build, **options):
        captures = (self.capture(build, which) for which in range(2))
        return prove(*captures, **options)

    def check_refused(self, reason, build, **options):
        with self.assertRaises(Refusal) as caught:
            self.prove(build, **options)
        self.assertEqual(caught.exception.reason, reason)

    def test_pointers_and_constants(self):
        template = self.prove(lambda at, _: [kernel(0, u64(at(0)), u64(5, at(2, 8)))])
        slots = (PointerSlot(0, 0, 0, 0, 0), PointerSlot(0, 1, 8, 2, 8))
        self.assertEqual(template.slots, slots)

    def test_address_that_did_not_move(self):
        self.check_refused(
            "unmoved", lambda at, _: [kernel(0, u64(LOW[0] + (1 << 16)))]
        )

    def test_address_that_is_shifted(self):
        self.check_refused("encoded", lambda at, _: [kernel(0, u64(at(0) >> 4, 1))])

    def test_address_outside_of_every_allocation(self):
        self.check_refused("outside", lambda at, _: [kernel(0, u64(at(0) - 8192))])

    def test_other_memory_of_the_device(self):
        foreign = [0x7F0000001000, 0x7F00FF002000]
        self.check_refused(
            "foreign",
            lambda at, which: [kernel(0, u64(1, foreign[which]))],
            foreign=lambda address: address in foreign,
        )

    def test_other_launch(self):
        self.check_refused(
            "launch", lambda at, which: [kernel(0, u64(1), grid=(which + 1, 1, 1))]
        )


if __name__ == "__main__":
    run_tests()
