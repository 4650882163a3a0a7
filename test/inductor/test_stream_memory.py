"""The account of a plan's memory: what is alive at the peak, and what lives longer than on one stream, and why."""

from typing import Any

import torch
from torch._inductor.test_case import TestCase

import form
from token_text import tokens
from torch_overlay import config
from torch_overlay._inductor.streams.plan import Buffer, Op, Plan
from torch_overlay._inductor.streams.planner import plan_streams
from torch_overlay.analysis.memory_report import account, amount, describe
from torch_overlay.testing import compile_only, simulated_gpu


MiB = 1 << 20


def op(name: str, stream: int, reads: str = "", writes: str = "", promised_to: str = "") -> Op:
    return Op(
        name, stream, frozenset(reads.split()), frozenset(writes.split()), promised_to=tokens(*promised_to.split())
    )


def planned(*ops: Op, **sizes: int) -> Plan:
    """A plan of operations whose buffers belong to the stream of their first writer."""
    first = {name: o.stream or 0 for o in reversed(ops) for name in o.writes}
    buffers = [Buffer(name, first[name], size=size * MiB, leaves=name == "out") for name, size in sizes.items()]
    return plan_streams(ops, buffers)


class TestAccount(TestCase):
    maxDiff = None

    def test_one_stream_holds_nothing_longer(self) -> None:
        plan = planned(op("f", 0, "", "a"), op("g", 0, "a", "b"), op("h", 0, "b", "out"), a=4, b=2, out=1)
        memory = account(plan)
        self.assertEqual((memory.peak, memory.peak_on_one_stream, memory.held), (6 * MiB, 6 * MiB, ()))
        self.assertEqual(describe(plan), [])

    def test_buffer_that_another_stream_read_is_held_until_its_own_is_behind_that(self) -> None:
        """`a` is read on stream 1; stream 0 is ordered after the reader only where it takes the reader's result."""
        ops = (
            op("f", 0, "", "a"),
            op("g", 1, "a", "b"),
            op("h", 0, "", "c"),
            op("i", 0, "c", "d"),
            op("j", 0, "b d", "out"),
        )
        plan = planned(*ops, a=4, b=1, c=2, d=2, out=1)
        memory = account(plan)
        self.assertEqual(memory.peak_on_one_stream, 5 * MiB)  # a and b, or b, c and d
        self.assertEqual(memory.peak, 9 * MiB)  # a until j, b, c and d
        self.assertExpectedInline(
            "\n".join(describe(plan)) + "\n",
            """\
Memory: 9.0 MiB at the peak, 4.0 MiB more than in the same order on one stream.
  a, 4.0 MiB of stream 0, is used last by 1 (g) on stream 1, and freed before 4 (j), where stream 0 is behind it
""",
        )

    def test_what_leaves_counts_to_the_end_on_both_sides(self) -> None:
        plan = planned(op("f", 1, "", "out"), op("g", 0, "out", "b"), out=4, b=1)
        self.assertEqual(account(plan), account(plan))
        self.assertEqual((account(plan).peak, account(plan).peak_on_one_stream), (5 * MiB, 5 * MiB))
        self.assertEqual(account(plan).held, ())

    def test_saved_memory_counts_from_the_beginning(self) -> None:
        buffer = Buffer("saved", 0, fresh=False, saved_on=1, settles=True, size=8 * MiB)
        ops = (op("f", 0, "saved", "b"), op("g", 0, "b", "c"))
        plan = plan_streams(ops, [buffer, Buffer("b", 0, size=MiB), Buffer("c", 0, size=MiB)])
        memory = account(plan)
        self.assertEqual(memory.peak_on_one_stream, 9 * MiB)
        self.assertEqual(memory.peak, 10 * MiB)  # stream 1, which may own the block, is after `f` at the exit only
        self.assertEqual([h.name for h in memory.held], ["saved"])

    def test_only_the_largest_are_listed(self) -> None:
        ops = [op("f", 0, "", " ".join(f"a{i}" for i in range(12)))]
        ops.append(op("g", 1, " ".join(f"a{i}" for i in range(12)), "out"))
        plan = planned(*ops, op("h", 0, "", "b"), **{f"a{i}": 12 - i for i in range(12)}, b=1, out=1)
        lines = describe(plan)
        self.assertEqual(len(lines), 12)
        self.assertEqual(lines[-1], "  and 2 more buffers, 3.0 MiB")

    def test_amounts(self) -> None:
        self.assertEqual(
            [amount(n) for n in (12, 1536, 3 << 20, 5 << 40)], ["12 B", "1.5 KiB", "3.0 MiB", "5120.0 GiB"]
        )


class TestRegion(TestCase):
    """Sizes of a compiled step's buffers."""

    def test_forward_and_backward(self) -> None:
        with simulated_gpu(), config.patch(fold_branches_below_us=0.0):
            side = torch.cuda.Stream()
            first, second = (torch.randn(512, 512, device="cuda", requires_grad=True) for _ in range(2))

            def forward(x: torch.Tensor) -> torch.Tensor:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    a = (x @ first).relu()
                b = (x @ second).sigmoid()
                torch.cuda.current_stream().wait_stream(side)
                return (a * b).sum()

            seen = compile_only(forward, torch.randn(512, 512, device="cuda"), backward=True)
        forward_plan, backward_plan = seen.plans
        sizes = {b.size for b in forward_plan.buffers if b.size > 1024}
        self.assertEqual(sizes, {MiB})
        kept = [b for b in forward_plan.buffers if b.leaves and b.size == MiB]
        self.assertTrue(kept)  # for the backward
        given = [b for b in backward_plan.buffers if not b.fresh and b.size]
        self.assertEqual(len(given), len(kept))
        memory = account(backward_plan)
        self.assertGreaterEqual(memory.peak, len(kept) * MiB)
        self.assertIn("at the peak", describe(backward_plan)[0])


@form.needs_gpu
class TestSnapshot(TestCase):
    """torch.cuda.memory's snapshots say of each block who made it; side streams are no exception."""

    def blocks(self, step: Any) -> list[tuple[int, list[str]]]:
        """Stream and frames of each block that is alive after the last of some calls of `step`."""
        for _ in range(4):
            kept = step()
        torch.cuda.synchronize()
        torch.cuda.memory._record_memory_history(stacks="python")
        try:
            kept = step()
            snapshot = torch.cuda.memory._snapshot()
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        del kept
        return [
            (segment["stream"], [f["name"] for f in block["frames"]])
            for segment in snapshot["segments"]
            for block in segment["blocks"]
            if block["state"] == "active_allocated" and block.get("frames")
        ]

    def make(self, mode: str | None) -> tuple[torch.Stream, Any]:
        torch._dynamo.reset()
        side = torch.cuda.Stream()
        weight = torch.randn(512, 512, device="cuda", requires_grad=True)
        x = torch.randn(512, 512, device="cuda")

        def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                a = (x @ weight).relu() @ weight
            b = (x @ weight).sigmoid()
            torch.cuda.current_stream().wait_stream(side)
            return a, b

        compiled = torch.compile(forward, fullgraph=True, mode=mode)

        def step_of_the_user() -> Any:
            a, b = compiled(x)
            weight.grad = None
            (a * b).sum().backward()
            return a, b, weight.grad

        return side, step_of_the_user

    def test_generated_code(self) -> None:
        with config.patch(fold_branches_below_us=0.0):
            side, step = self.make(None)
            blocks = self.blocks(step)
        self.assertIn(side.cuda_stream, [stream for stream, _ in blocks])
        for _, names in blocks:
            # The backward's blocks are made in autograd's thread, where the user has no frame.
            self.assertIn("call", names, names)
        of_forward = [(stream, names) for stream, names in blocks if "step_of_the_user" in names]
        self.assertIn(side.cuda_stream, [stream for stream, _ in of_forward])

    def test_relaunched_graph(self) -> None:
        _, step = self.make("reduce-overhead")
        blocks = self.blocks(step)
        self.assertTrue([names for _, names in blocks if "step_of_the_user" in names], blocks)
