#!/usr/bin/env python3
"""Ten programs in one process, relaunched until something grows: memory of the host or of the device, or an error.

    python tools/bench/soak.py [--relaunches 100000] [--every 1000]
    python tools/bench/soak.py --device cpu --relaunches 40 --every 20      whether the programs run: no graphs

The programs take turns. After each --every relaunches, the results of one call of each are compared with those of the
same program compiled without graphs, and memory is noted: resident memory of the process, memory in use on the device,
memory that the allocator has reserved and allocated. The first sample after the last capture, and after the first
--every relaunches, is the base: nothing may grow beyond it by more than `ALLOWED`. Graphs that replace an earlier one
count as growth, too; the first graph of a size does not, which waits until calls have paid for it. The exit status is 1
if a value differs, or if something grows.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters


HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]

import records  # noqa: E402  # pyrefly: ignore[missing-import]
import streams  # noqa: E402  # pyrefly: ignore[missing-import]
from relaunch_process import device_used, MIB  # noqa: E402  # pyrefly: ignore[missing-import]

import torch_overlay  # noqa: E402
from torch_overlay._inductor.relaunch import runners  # noqa: E402


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Call = Callable[[int], list[torch.Tensor]]  # results of the call on the input set of this number
Compile = Callable[[Any], Any]
Sample = dict[str, float]  # MiB, and the number of captures

SETS = 4  # of inputs
WIDTH, LAYERS, THREADS = 64, 4, 4
SIZES = (3, 5, 9, 17), tuple(range(20, 32))
ALLOWED = {"host": 8.0, "device": 2.0, "reserved": 0.0, "allocated": 0.0, "captured again": 0}  # MiB; a leak adds up


def _model(device: str) -> nn.Sequential:
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers).to(device)


def _inputs(device: str, rows: int = 16) -> list[torch.Tensor]:
    return [torch.randn(rows, WIDTH, device=device) for _ in range(SETS)]


def inference(device: str, compile: Compile) -> Call:
    compiled, inputs = compile(_model(device)), _inputs(device)
    return torch.no_grad()(lambda i: [compiled(inputs[i])])


def training(device: str, compile: Compile) -> Call:
    model, inputs = _model(device), _inputs(device)
    loss = compile(lambda x: model(x).square().mean())

    def call(i: int) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        loss(inputs[i]).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    return call


def offload(device: str, compile: Compile) -> Call:
    """Training whose saved activations leave the device."""
    if device == "cpu":
        return training(device, compile)
    with torch_overlay.config.patch(activation_offload={"budget_gb": 1e-4, "strict": False}):
        call = training(device, compile)
        call(0)
    return call


def branches(device: str, compile: Compile) -> Call:
    first, second, inputs = _model(device), _model(device), _inputs(device)
    side: Any = torch.cuda.Stream() if device == "cuda" else None

    def both(x: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            a = first(x)
        b = second(x)
        current.wait_stream(side)
        return a + b

    compiled = compile(both if side is not None else lambda x: first(x) + second(x))
    return torch.no_grad()(lambda i: [compiled(inputs[i])])


def sizes(device: str, compile: Compile, rows: Sequence[int]) -> Call:
    model = _model(device)
    compiled = compile(lambda x: model(x).softmax(0))
    inputs = [torch.randn(n, WIDTH, device=device) for n in rows]
    torch._dynamo.maybe_mark_dynamic(inputs[0], 0)
    return torch.no_grad()(lambda i: [compiled(x) for x in inputs[i % 2 :: 2]])


def threads(device: str, compile: Compile) -> Call:
    """Four threads at once. All take part in each call: a thread's first product allocates a cuBLAS workspace."""
    model, inputs = _model(device), _inputs(device)
    compiled, pool = compile(model), concurrent.futures.ThreadPoolExecutor(THREADS)
    forward, all_here = torch.no_grad()(compiled), threading.Barrier(THREADS)

    def answer(x: torch.Tensor) -> torch.Tensor:
        all_here.wait()
        result = forward(x)
        if device == "cuda":
            torch.cuda.current_stream().synchronize()
        return result

    return lambda i: list(pool.map(answer, [inputs[i]] * THREADS))


def condition(device: str, compile: Compile) -> Call:
    first, second, inputs = _model(device), _model(device), _inputs(device)
    compiled = compile(lambda x: torch.cond(x.sum() > 0, first, second, (x,)))
    return torch.no_grad()(lambda i: [compiled(inputs[i])])


def in_place(device: str, compile: Compile) -> Call:
    model, inputs = _model(device), _inputs(device, rows=1)
    cache = torch.zeros(SETS, WIDTH, device=device)
    places = [torch.tensor([i], device=device) for i in range(SETS)]

    def update(x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return cache.index_copy_(0, place, model(x)).sum(0)

    compiled = compile(update)

    def call(_: int) -> list[torch.Tensor]:
        for x, place in zip(inputs, places):
            compiled(x, place)
        return [cache]

    return torch.no_grad()(call)


def random(device: str, compile: Compile) -> Call:
    model, inputs = _model(device), _inputs(device)
    compiled = compile(lambda x: F.dropout(model(x), 0.3))

    def call(i: int) -> list[torch.Tensor]:
        torch.manual_seed(i)
        return [compiled(inputs[i])]

    return torch.no_grad()(call)


PROGRAMS: dict[str, Callable[[str, Compile], Call]] = {
    "inference": inference,
    "training": training,
    "offload": offload,
    "streams": branches,
    "few sizes": lambda device, compile: sizes(device, compile, SIZES[0]),
    "many sizes": lambda device, compile: sizes(device, compile, SIZES[1]),
    "threads": threads,
    "condition": condition,
    "in place": in_place,
    "random": random,
}


def sample(device: str) -> Sample:
    """Return the MiB in use, without garbage, the captures so far, and those of them whose graph is gone."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"host": pages * os.sysconf("SC_PAGE_SIZE") / MIB}
    if device == "cuda":
        torch.cuda.synchronize()
        in_use = device_used(), torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        found |= {name: n / MIB for name, n in zip(("device", "reserved", "allocated"), in_use)}
    captures = counters["torch_overlay"]["cudagraph_captures"]
    return {**found, "captures": captures, "captured again": captures - runners.counts()["templates"]}


def growth(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the quantities that grew by more than is allowed, and by how much, from the first sample after the last
    capture of the first half."""
    half = samples[: len(samples) // 2 + 1]
    base = next(each for each in samples if each["captures"] == half[-1]["captures"])
    grown = {name: samples[-1][name] - base[name] for name in ALLOWED if name in base}
    return {name: by for name, by in grown.items() if by > ALLOWED[name]}


def different(calls: Mapping[str, Call], wanted: Mapping[str, Call], i: int) -> list[str]:
    """Return the programs whose results aren't those without graphs, each with the reason."""
    wrong = []
    for name, call in calls.items():
        try:
            torch.testing.assert_close(call(i), wanted[name](i), rtol=1e-4, atol=1e-5)
        except AssertionError as error:
            wrong.append(f"{name}, inputs {i}: {str(error).strip()}")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relaunches", type=records.positive, default=100_000, help="in all; without a GPU, calls")
    parser.add_argument("--every", type=records.positive, default=1000, help="relaunches between two checks")
    parser.add_argument("--limit", type=records.seconds, default=3600.0, help="seconds after which it ends early")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(argv)
    start = time.monotonic()

    def made(**options: Any) -> dict[str, Call]:
        if args.device == "cpu":
            options = {"backend": "aot_eager"}
        torch.manual_seed(0)
        return {name: make(args.device, lambda fn: torch.compile(fn, **options)) for name, make in PROGRAMS.items()}

    wanted, calls = made(), made(mode="reduce-overhead")
    samples: list[Sample] = []
    wrong: list[str] = []
    done = turns = 0
    while done < args.relaunches and not wrong and time.monotonic() - start < args.limit:
        for call in calls.values():
            call(turns % SETS)
        turns += 1
        relaunches = counters["torch_overlay"]["cudagraph_relaunches"] if args.device == "cuda" else turns * len(calls)
        if relaunches >= done + args.every:
            done = relaunches
            wrong = different(calls, wanted, len(samples) % SETS)
            samples.append(sample(args.device))
    rows = [samples[0], samples[len(samples) // 2], samples[-1]] if samples else []
    header = ["", "after the first", "half-way", "at the end"]
    table = [[name, *(f"{each[name]:.1f}" for each in rows)] for name in samples[0]] if rows else []
    grown = growth(samples) if rows else {"relaunches": 0.0}
    about = streams.describe()
    print(f"{about['hardware']}, torch {about['torch, cuda, triton']}, commit {about['commit']}")
    print(f"{done} relaunches, {turns} calls of each of {len(calls)} programs, {time.monotonic() - start:.0f} s\n")
    print("\n".join(streams.aligned([header, *table])))
    print("\n".join([*(f"different: {each}" for each in wrong), *(f"{k} grew by {v:.1f}" for k, v in grown.items())]))
    return 1 if wrong or grown or done < args.relaunches else 0


if __name__ == "__main__":
    sys.exit(main())
