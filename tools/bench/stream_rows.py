"""What the stream benchmark measures: one function a row, run in a process of its own by streams.py.

Each function returns named medians; streams.py divides them. A call's time is taken on the host, from an idle device
until the device is idle again, or, where a row says so, until the call returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Callable


ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

Measurement = dict[str, float]


def call_time(
    fn: Callable[[], Any], calls: int = 100, warmup: int = 10, before: Callable[[], Any] = lambda: None
) -> float:
    """Median microseconds from an idle device to an idle device. `before` runs before each call, untimed."""
    for _ in range(warmup):
        fn()
    times = []
    for _ in range(calls):
        before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        fn()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def host_time(fn: Callable[[], Any], calls: int = 50, rounds: int = 15, warmup: int = 20) -> float:
    """Median microseconds of host time for one call, the device keeping up."""
    for _ in range(warmup):
        fn()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        times.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def alternately(timer: Callable[..., float], sides: dict[str, Callable[[], Any]], rounds: int = 6) -> Measurement:
    """Each side's median over rounds that time the sides in turns and in both orders: what drifts, drifts for all."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            times[name].append(timer(sides[name]))
    return {name: statistics.median(each) for name, each in times.items()}


def peak_memory(fn: Callable[[], Any]) -> float:
    """Bytes that a call has allocated at most, beyond what was there."""
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # the allocator takes back what other streams have used, now that they are done
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def compiled(fn: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    return torch.compile(fn, fullgraph=True, **kwargs)


# ---- two chains that each fill less than half of the device


def _chain_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit
    def spin(source, target, rounds, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(source + offsets)
        for _ in range(rounds):
            value = value * 0.999 + 0.001
        tl.store(target + offsets, value)

    return spin


def two_chains() -> Measurement:
    """A chain is ten launches of 48 blocks, about 2 ms in all; an H100 or H200 has 132 multiprocessors."""
    spin, blocks, size = _chain_kernel(), 48, 256
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    rounds = 20_000

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            y = torch.empty_like(x)
            spin[(blocks,)](x, y, rounds, BLOCK=size)
            x = y
        return x

    def one(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return chain(x)

    def two(x: torch.Tensor, y: torch.Tensor) -> Any:
        current = torch.cuda.current_stream()
        first.wait_stream(current)
        second.wait_stream(current)
        with torch.cuda.stream(first):
            a = chain(x)
        with torch.cuda.stream(second):
            b = chain(y)
        current.wait_stream(first)
        current.wait_stream(second)
        return a, b

    x, y = torch.rand(blocks * size, device="cuda"), torch.rand(blocks * size, device="cuda")
    rounds = int(rounds * 2000 / call_time(lambda: chain(x), calls=20))
    result = {}
    for name, fn in (("one", one), ("two", two)):
        call = compiled(fn)
        result[name] = call_time(lambda call=call: call(x, y), calls=40)
        if name == "two":
            result["overlap"] = overlap(lambda call=call: call(x, y))
    return result


def overlap(fn: Callable[[], Any]) -> float:
    """How much of the time of the busiest stream another stream is busy, too, as the profiler sees it: 0 to 1."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        fn()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans: dict[Any, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            spans.setdefault(event["args"]["stream"], []).append((event["ts"], event["ts"] + event["dur"]))
    if not spans:
        raise RuntimeError("the profiler saw no kernel")
    busiest = max(spans, key=lambda s: sum(end - start for start, end in spans[s]))
    total = sum(end - start for start, end in spans[busiest])
    shared = sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for stream, others in spans.items()
        if stream != busiest
        for other_start, other_end in others
        for start, end in spans[busiest]
    )
    return shared / total


# ---- sixteen small blocks


def sixteen_blocks() -> Measurement:
    streams = [torch.cuda.Stream() for _ in range(4)]

    def block(x: torch.Tensor, i: int) -> torch.Tensor:
        return torch.relu(x * (i + 1) + i)

    def plain(x: torch.Tensor) -> Any:
        outputs = [block(x, i) for i in range(16)]
        return sum(outputs[1:], outputs[0])

    def streamed(x: torch.Tensor) -> Any:
        current = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(current)
        outputs = []
        for i in range(16):
            with torch.cuda.stream(streams[i % 4]):
                outputs.append(block(x, i))
        for stream in streams:
            current.wait_stream(stream)
        return sum(outputs[1:], outputs[0])

    x = torch.rand(1024, device="cuda")
    without, with_streams = compiled(plain), compiled(streamed)
    return alternately(host_time, {"plain": lambda: without(x), "streams": lambda: with_streams(x)})


# ---- eight experts


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

        def weights() -> torch.nn.ParameterList:
            return torch.nn.ParameterList(
                torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) / 32 for _ in range(8)
            )

        self.streams = [torch.cuda.Stream() for _ in range(8)]
        self.up, self.down = weights(), weights()
        self.x = torch.randn(128, 1024, device="cuda", dtype=torch.bfloat16)

    def one_stream(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [(x @ up).relu() @ down for up, down in zip(self.up, self.down)]
        return torch.stack(outputs).sum(0)

    def eight_streams(self, x: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        outputs = []
        for stream, up, down in zip(self.streams, self.up, self.down):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                outputs.append((x @ up).relu() @ down)
        for stream in self.streams:
            current.wait_stream(stream)
        return torch.stack(outputs).sum(0)


@torch.no_grad()
def experts() -> Measurement:
    e = Experts()
    one, eight = compiled(e.one_stream), compiled(e.eight_streams)
    return alternately(call_time, {"one stream": lambda: one(e.x), "eight streams": lambda: eight(e.x)})


def _graph(fn: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return graph


@torch.no_grad()
def experts_graphed() -> Measurement:
    """The compiled code takes a fresh input and checks what it is given; the graph made by hand replays on the same
    input, and knows nothing."""
    e = Experts()
    graph = _graph(lambda: e.eight_streams(e.x))
    graphed = compiled(e.eight_streams, mode="reduce-overhead")
    return alternately(call_time, {"graph by hand": graph.replay, "reduce-overhead": lambda: graphed(e.x)})


@torch.no_grad()
def experts_memory() -> Measurement:
    e = Experts()
    result = {"eager": peak_memory(lambda: e.eight_streams(e.x))}
    eight = compiled(e.eight_streams)
    result["compiled"] = peak_memory(lambda: eight(e.x))
    return result


# ---- a training step of two such chains


def _layer() -> Callable[[torch.Tensor, int], torch.Tensor]:
    spin = _chain_kernel()

    def launch(x: torch.Tensor, rounds: int) -> torch.Tensor:
        y = torch.empty_like(x)
        spin[(x.numel() // 256,)](x, y, rounds, BLOCK=256)
        return y

    class Layer(torch.autograd.Function):
        """A kernel in the forward and one as long in the backward, as an activation function is."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, rounds: int) -> torch.Tensor:
            ctx.rounds = rounds
            return launch(x, rounds)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyrefly: ignore[bad-override]
            return launch(gradient.contiguous(), ctx.rounds), None

    return Layer.apply


class TwoBranches:
    """Two branches of ten layers with a weight each: launches of 48 blocks, as in `two_chains`."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer, self.side, self.rounds = _layer(), torch.cuda.Stream(), 20_000
        self.x = torch.rand(48 * 256, device="cuda")
        self.first, self.second = ([torch.rand_like(self.x).requires_grad_() for _ in range(10)] for _ in range(2))

    def branch(self, x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for weight in weights:
            x = self.layer(x * weight, self.rounds)
        return x

    def one_branch(self, x: torch.Tensor) -> torch.Tensor:
        return self.branch(x, self.first).mean()

    def one_stream(self, x: torch.Tensor) -> torch.Tensor:
        return (self.branch(x, self.first) + self.branch(x, self.second)).mean()

    def two_streams(self, x: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            a = self.branch(x, self.first)
        b = self.branch(x, self.second)
        current.wait_stream(self.side)
        return (a + b).mean()

    def step(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        loss = forward(self.x)
        loss.backward()
        for weight in (*self.first, *self.second):
            weight.grad = None
        return loss.detach()


def training(mode: str | None = None) -> Measurement:
    """A branch takes about 2 ms forward and 2 ms backward."""
    branches = TwoBranches()
    one_forward = call_time(lambda: branches.one_branch(branches.x), calls=20)
    branches.rounds = int(branches.rounds * 2000 / one_forward)
    sides: dict[str, Callable[[], Any]] = {}
    for name, forward in (("one stream", branches.one_stream), ("two streams", branches.two_streams)):
        call = compiled(forward, mode=mode)
        sides[name] = lambda call=call: branches.step(call)
    result = alternately(call_time, sides, rounds=2)
    result["overlap"] = overlap(sides["two streams"])
    return result


def training_memory() -> Measurement:
    """Peak memory of a step, streams or none: the two branches, with activations large enough to count; and experts."""
    branches = TwoBranches()
    branches.rounds = 50
    branches.x = torch.rand(1 << 20, device="cuda")
    branches.first, branches.second = (
        [torch.rand_like(branches.x).requires_grad_() for _ in range(10)] for _ in range(2)
    )
    result = {}
    for name, forward in (("one stream", branches.one_stream), ("two streams", branches.two_streams)):
        call = compiled(forward)
        result[name] = peak_memory(lambda call=call: branches.step(call))
    e = Experts()
    e.requires_grad_()
    x = torch.randn(2048, 1024, device="cuda", dtype=torch.bfloat16)

    def step(forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        forward(x).float().square().mean().backward()
        e.zero_grad()

    for name, forward in (("experts, one stream", e.one_stream), ("experts, eight streams", e.eight_streams)):
        call = compiled(forward)
        result[name] = peak_memory(lambda call=call: step(call))
    return result


# ---- compile time of a program without streams


@torch.no_grad()
def compile_time(repetitions: int = 3) -> Measurement:
    from torch._inductor.utils import fresh_cache
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).cuda().eval()
    tokens = torch.randint(0, 50257, (1, 128), device="cuda")
    warm = compiled(lambda x: torch.relu(x) @ x)
    warm(torch.rand(64, 64, device="cuda"))
    times = []
    for _ in range(repetitions):
        torch._dynamo.reset()
        with fresh_cache():
            torch.cuda.synchronize()
            start = time.perf_counter()
            torch.compile(model)(tokens)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return {"seconds": statistics.median(times)}


ROWS: dict[str, Callable[[], Measurement]] = {
    "two chains": two_chains,
    "sixteen blocks": sixteen_blocks,
    "experts": experts,
    "experts graphed": experts_graphed,
    "experts memory": experts_memory,
    "training": training,
    "training graphed": lambda: training("reduce-overhead"),
    "training memory": training_memory,
    "compile time": compile_time,
}


def main(names: list[str]) -> None:
    """Run the named rows and print one JSON line for each, on the real stdout."""
    if os.environ.get("TORCH_OVERLAY_DISABLE") != "1":
        import torch_overlay  # noqa: F401
    with os.fdopen(os.dup(1), "w") as out, contextlib.redirect_stdout(sys.stderr):
        for name in names:
            torch._dynamo.reset()
            try:
                answer: dict[str, Any] = {"row": name, "result": ROWS[name]()}
            except Exception as e:
                traceback.print_exc()
                answer = {"row": name, "error": f"{type(e).__name__}: {e}"[:300]}
            print(json.dumps(answer), file=out, flush=True)
            torch.cuda.synchronize()  # a lost context ends the process; the parent goes on with another


if __name__ == "__main__":
    main(sys.argv[1:])
