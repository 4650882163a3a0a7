"""Regions of short kernels keep to the caller's stream in calls that find the device idle; others never do."""

import re
from typing import Any

import torch
from torch._dynamo.test_case import TestCase

import form
from torch_overlay.analysis import check_wrapper
from torch_overlay.testing import Compiled, observe, simulated_gpu


def two_branches(work: Any, streams: list[Any], tail: Any = torch.add) -> Any:
    """fn(x, ...): `work` on each stream between a fork and a join, `tail` of the results on the current stream."""

    def fn(*inputs: Any) -> Any:
        current, results = torch.cuda.current_stream(), []
        for stream in streams:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                results.append(work(*inputs))
        for stream in streams:
            current.wait_stream(stream)
        return tail(*results)

    return fn


def matmuls(x: torch.Tensor) -> torch.Tensor:
    return (x @ x).relu() @ x


class TestStreamIdle(TestCase):
    def compile(self, build: Any, *inputs: Any, mode: str | None = None, dynamic: bool | None = None) -> Compiled:
        torch._dynamo.reset()
        with observe() as seen:
            torch.compile(build, mode=mode, dynamic=dynamic, fullgraph=True)(*inputs)
        return seen

    @simulated_gpu()
    def test_two_branches_as_they_are_written(self) -> None:
        fn = two_branches(matmuls, [torch.cuda.Stream() for _ in range(2)])
        seen = self.compile(fn, torch.randn(64, 64, device="cuda"))
        relevant = r"idle_streams|if multi_stream|else: |# reuse|mm\(|\.run"
        self.assertExpectedInline(
            "".join(f"{line.strip()}\n" for line in seen.calls().splitlines() if re.search(relevant, line)),
            """\
idle_streams=(1, 2),  # stream1, stream2
if multi_stream: set_stream(stream1)
extern_kernels.mm(arg0_1, arg0_1, out=buf0)
buf1 = buf0; del buf0  # reuse
triton_poi_fused_relu_0.run(buf1, 4096, stream=stream1_raw)
extern_kernels.mm(buf1, arg0_1, out=buf2)
if multi_stream: del buf1
if multi_stream: ev1.record(stream1_raw)
if multi_stream: ev0.wait(stream2_raw)
if multi_stream: set_stream(stream2)
if multi_stream: buf3 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
else: buf3 = buf1; del buf1  # reuse
extern_kernels.mm(arg0_1, arg0_1, out=buf3)
buf4 = buf3; del buf3  # reuse
triton_poi_fused_relu_0.run(buf4, 4096, stream=stream2_raw)
extern_kernels.mm(buf4, arg0_1, out=buf5)
if multi_stream: del buf4
if multi_stream: ev2.record(stream2_raw)
if multi_stream: ev1.wait(stream0_raw)
if multi_stream: ev2.wait(stream0_raw)
if multi_stream: set_stream(stream0)
if multi_stream: buf6 = empty_strided_cuda((64, 64), (64, 1), torch.float32)
else: buf6 = buf4; del buf4  # reuse
triton_poi_fused_add_1.run(buf2, buf5, buf6, 4096, stream=stream0_raw)
if multi_stream: restore_stream(stream0)
""",
        )

    @simulated_gpu()
    def test_streams_of_the_function_need_no_order(self) -> None:
        def fn(x: torch.Tensor) -> torch.Tensor:
            return two_branches(matmuls, [torch.cuda.Stream() for _ in range(2)])(x)

        self.assertIn("idle_streams=(),", self.compile(fn, torch.randn(64, 64, device="cuda")).wrappers[0])

    @simulated_gpu()
    def test_the_check_sees_memory_that_is_shared_too_early(self) -> None:
        """A wrapper that shares memory although it runs on several streams has races, and they are found."""
        fn = two_branches(matmuls, [torch.cuda.Stream() for _ in range(2)])
        wrapper = self.compile(fn, torch.randn(64, 64, device="cuda")).wrappers[0]
        broken = re.sub(r" *if multi_stream: (del buf|buf\d+ = ).*\n", "", wrapper).replace("else: buf", "buf")
        self.assertEqual(broken.count("# reuse"), wrapper.count("# reuse"))
        self.assertNotEqual(check_wrapper(broken).races, [])


@form.needs_gpu
class TestOnGpu(TestCase):
    def test_idle_and_busy_calls_in_turns(self) -> None:
        """Long work of the caller's on the current or on a side stream, before the call or between two calls."""
        streams = [torch.cuda.Stream() for _ in range(4)]
        fn = two_branches(lambda x, w: (x @ w).relu() @ w, streams, tail=lambda *r: torch.stack(r).sum(0))
        compiled = torch.compile(fn, fullgraph=True)
        w = torch.randn(256, 256, device="cuda") / 16
        for call in range(40):
            x = torch.randn(64, 256, device="cuda")
            expected = 4 * ((x @ w).relu() @ w)
            torch.cuda.synchronize()
            late = torch.zeros_like(x)
            stream = (None, torch.cuda.current_stream(), streams[1], streams[3])[call % 4]
            if stream is not None:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(2_000_000)
                    late.copy_(x)
                if stream is not torch.cuda.current_stream():
                    torch.cuda.current_stream().wait_stream(stream)
            else:
                late.copy_(x)
                torch.cuda.synchronize()
            result = compiled(late, w)
            busy = streams[call % 4]
            busy.wait_stream(torch.cuda.current_stream())  # all branches have read
            with torch.cuda.stream(busy):
                late.zero_()
            torch.cuda.current_stream().wait_stream(busy)
            self.assertEqual(result, expected, atol=1e-2, rtol=1e-2)
