"""Memory snapshots: each block has its buffer and its line."""

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch._inductor.test_case import TestCase

import form
from torch_overlay._inductor.relaunch import runner
from torch_overlay.analysis import memory_blocks
from torch_overlay.testing import compile_only, observe, simulated_gpu


def program(side: Any) -> Any:
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            a = (x @ w).relu()
        values, _ = (x @ x).topk(8)
        current.wait_stream(side)
        return a.sum() + values

    return fn


@functools.cache
def compiled_program() -> Any:
    with simulated_gpu():
        x = torch.randn(64, 64, device="cuda")
        return compile_only(program(torch.cuda.Stream()), x, x)


def snapshot(*blocks: dict[str, Any], stream: int = 0) -> dict[str, Any]:
    size = sum(block["size"] for block in blocks)
    return {"segments": [{"address": 4096, "total_size": size, "stream": stream, "device": 0, "blocks": [*blocks]}]}


def block(size: int, *frames: tuple[str, int, str], state: str = "active_allocated") -> dict[str, Any]:
    return {
        "size": size,
        "requested_size": size - 12,
        "state": state,
        "frames": [{"filename": file, "line": line, "name": name} for file, line, name in frames],
    }


class TestMemoryBlocks(TestCase):
    def setUp(self) -> None:
        super().setUp()
        folder = self.enterContext(tempfile.TemporaryDirectory())
        self.path = str(Path(folder, "cgenerated.py"))
        self.seen = compiled_program()
        self.text = self.seen.wrappers[0]
        Path(self.path).write_text(self.text)
        self.user = (__file__, 7, "train")

    def where(self, part: str) -> tuple[str, int, str]:
        """The frame of the first statement that has a part in it."""
        numbers = [i for i, line in enumerate(self.text.splitlines(), 1) if part in line]
        return self.path, numbers[0], "call"

    def test_buffer_has_the_line_of_the_kernel_that_writes_it(self) -> None:
        found = memory_blocks(snapshot(block(512, self.where("buf0 = empty_strided_cuda"), self.user)), self.seen)
        self.assertEqual((found[0].kind, found[0].name, found[0].nbytes), ("compiled code", "buf0", 500))
        self.assertRegex(
            found[0].line, r"test_memory_blocks\.py:\d+: (a = \(x @ w\)\.relu|values, _ = \(x @ x\)\.topk)"
        )

    def test_every_allocation_of_the_module_has_its_own_line(self) -> None:
        allocations = [i for i, t in enumerate(self.text.splitlines(), 1) if "= empty_strided_cuda((" in t]
        self.assertGreater(len(allocations), 2)
        found = memory_blocks(snapshot(*(block(512, (self.path, i, "call")) for i in allocations)), self.seen)
        lines = {b.name: b.line for b in found}
        self.assertEqual(len(lines), len(allocations))
        for code in ("relu", "topk", "sum"):
            self.assertTrue(any(code in line for line in lines.values()), lines)
        self.assertNotIn("", lines.values())

    def test_operator_that_allocates_its_result(self) -> None:
        (found,) = memory_blocks(snapshot(block(512, self.where("torch.ops.aten.topk"))), self.seen)
        self.assertIn("topk(8)", found.line)

    def test_copy_has_its_own_line(self) -> None:
        with simulated_gpu():
            host = torch.randn(64, pin_memory=True)
            self.seen = compile_only(lambda x: (x.sin().sum(), host.to("cuda", non_blocking=True)), host.cuda())
        self.text = self.seen.wrappers[0]
        Path(self.path).write_text(self.text)
        copied = re.search(r"(\w+)\.copy_\(", self.text)[1]
        at = self.where(f"{copied} = empty_strided")
        self.assertIn("host.to(", memory_blocks(snapshot(block(512, at)), self.seen)[0].line)
        self.assertEqual(memory_blocks(snapshot(block(512, at)))[0].line, "")

    def test_without_the_compilation_nodes_are_named(self) -> None:
        (found,) = memory_blocks(snapshot(block(512, self.where("torch.ops.aten.topk"))))
        self.assertIn("topk", found.line)

    def test_memory_of_a_graph_is_the_graphs(self) -> None:
        inside = (runner.__file__, 1, "run")
        (found,) = memory_blocks(snapshot(block(512, inside, (torch.__file__, 1, "x"), self.user)))
        self.assertEqual((found.kind, found.line), ("CUDA graph", "test_memory_blocks.py:7: train"))

    def test_eager_block_has_the_users_frame(self) -> None:
        (found,) = memory_blocks(snapshot(block(512, (torch.__file__, 1, "x"), self.user)))
        self.assertEqual((found.kind, found.line), ("eager", "test_memory_blocks.py:7: train"))

    def test_block_without_frames(self) -> None:
        (found,) = memory_blocks(snapshot(block(512)))
        self.assertEqual((found.kind, found.line), ("no frames", ""))

    def test_addresses_are_added_up(self) -> None:
        found = memory_blocks(snapshot(block(512), block(1024), block(512, state="inactive")))
        self.assertEqual([b.address for b in found], [4096, 4608, 5632])

    def test_text_sums_what_is_in_use(self) -> None:
        blocks = [block(1036, self.user), block(1036, self.user), block(2060), block(9999, state="inactive")]
        self.assertExpectedInline(
            str(memory_blocks(snapshot(*blocks, stream=0x20))),
            """\
4.0 KiB in 3 blocks
   2.0 KiB     2 of stream 0x20, eager, test_memory_blocks.py:7: train
   2.0 KiB     1 of stream 0x20, no frames""",
        )


@form.needs_gpu
class TestGpu(TestCase):
    def blocks(self, mode: str | None) -> Any:
        torch._dynamo.reset()
        x, w = (torch.randn(512, 512, device="cuda") for _ in range(2))
        with observe() as seen:
            compiled = torch.compile(program(torch.cuda.Stream()), mode=mode)
            for _ in range(4):
                compiled(x, w)
        torch.cuda.memory._record_memory_history(stacks="python")
        try:
            kept = compiled(x, w)
            found = memory_blocks(torch.cuda.memory._snapshot(), seen)
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        address = kept.untyped_storage().data_ptr()
        return found, [b for b in found if b.address <= address < b.address + max(b.nbytes, 1)]

    def test_output_of_compiled_code_has_its_line(self) -> None:
        _, (found,) = self.blocks(None)
        self.assertEqual(found.kind, "compiled code")
        self.assertIn("values, _ = (x @ x).topk(8)", found.line)  # the sum is written into that memory

    def test_output_of_a_graph_is_the_graphs(self) -> None:
        _, (found,) = self.blocks("reduce-overhead")
        self.assertEqual(found.kind, "CUDA graph")
