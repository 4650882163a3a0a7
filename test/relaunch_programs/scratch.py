"""Scratch memory of graphs, launch after launch."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from relaunch_programs._program import Kit, program
from relaunch_programs.composition import in_threads, thread_kits


OFTEN = 24  # calls


def chain(x: torch.Tensor) -> torch.Tensor:
    """Products whose factors are all scratch."""
    y = torch.tanh(x @ x.t() / 8)
    z = torch.softmax(y @ y.t(), -1)
    return (z @ y) @ x + x


def wide(x: torch.Tensor) -> torch.Tensor:
    """Much more of it."""
    y = torch.cat([x, x.sin(), x.cos(), x * 2], 1)
    return torch.tanh(y @ y.t() / 16).cumsum(0) @ x / x.shape[0]


@program("one function's scratch is where another one's was, of another size", launches=3 * (OFTEN - 2))
def scratch_of_several_functions(k: Kit) -> None:
    functions = [k.compile(chain), k.compile(wide), k.compile(lambda x: chain(wide(x)))]
    held = []
    for i in k.steps(OFTEN + 6):
        x = k.randn(96, 96)
        held.append([f(x) for f in (functions if i % 2 else functions[::-1])])
    k.see("outputs", held)


@program("a function with scratch is dropped while another one goes on", launches=60)
def scratch_outlives_a_function(k: Kit) -> None:
    kept = k.compile(chain)
    for _ in range(3):
        f = k.compile(lambda x: wide(x) + 1)
        for i in k.steps(OFTEN):
            x = k.randn(64, 64)
            k.see("outputs", (f(x), kept(x) if i > 4 else None))
        del f
    for _ in k.steps(4):
        k.see("alone", kept(k.randn(64, 64)))


@program("launches with scratch on several streams, without an order between them", launches=60)
def scratch_of_several_streams(k: Kit) -> None:
    f = k.compile(chain)
    streams = [k.stream() for _ in range(6)]
    for _ in k.steps(OFTEN):
        inputs = [k.randn(128, 128) for _ in streams]
        outputs = []
        for stream, x in zip(streams, inputs):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
                outputs.append(f(x))
        for stream in filter(None, streams):
            torch.cuda.current_stream().wait_stream(stream)
        k.see("outputs", outputs)


@program("threads launch on one stream, and each launch has scratch of its own", launches=60)
def scratch_of_two_threads(k: Kit) -> None:
    functions = [k.compile(chain), k.compile(wide)]
    for f in functions:
        for _ in k.steps(2):
            f(k.randn(96, 96))
    kits = thread_kits(k, 3)

    def body(number: int, kit: Kit) -> Callable[[], None]:
        def run() -> None:
            for i in kit.steps(3 * OFTEN):
                kit.see("outputs", functions[(i + number) % 2](kit.randn(96, 96)))

        return run

    in_threads(k, *(body(number, kit) for number, kit in enumerate(kits)))
    for kit in kits:
        k.seen += kit.seen


@program("scratch lies in a pool that the caller has selected, and that goes", launches=2 * OFTEN)
def scratch_in_a_pool_that_goes(k: Kit) -> None:
    f = k.compile(chain)
    for number in range(3):
        pool = torch.cuda.MemPool() if k.gpu else None
        with torch.cuda.use_mem_pool(pool) if pool is not None else contextlib.nullcontext():
            for _ in k.steps(OFTEN):
                k.see("inside", f(k.randn(96, 96)))
        k.synchronize()
        for _ in k.steps(OFTEN if number == 1 else 2):
            k.see("outside", f(k.randn(96, 96)))
        del pool


@program("a launch leaves nothing allocated but its outputs", launches=OFTEN - 2)
def scratch_is_freed(k: Kit) -> None:
    f = k.compile(chain)
    x = k.randn(96, 96)
    for i in k.steps(OFTEN + 4):
        before = allocated(k)
        y = f(x)
        k.synchronize()
        added = allocated(k) - before - y.untyped_storage().nbytes()
        k.see("kept", added if k.graphs and i > 4 else 0)
        del y


def allocated(k: Kit) -> Any:
    return torch.cuda.memory_allocated() if k.gpu else 0


@program("the process exits with graphs that have scratch", launches=OFTEN, alone=True)
def scratch_of_graphs_at_exit(k: Kit) -> None:
    f, g = k.compile(chain), k.compile(wide)
    for _ in k.steps(OFTEN):
        x = k.randn(96, 96)
        k.see("outputs", (f(x), g(x)))
    k.outlives((f, g))
