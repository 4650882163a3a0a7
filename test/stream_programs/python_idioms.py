"""Python around streams: where programs keep them, how they enter them, what they ask and print."""

import contextlib
import functools
import sys
import threading
from typing import Any

import torch

from stream_programs._program import fork, join, joins_all, Kit, matrices, program


def _fork_join(side: torch.cuda.Stream, sleep: Any, x: torch.Tensor) -> torch.Tensor:
    """Work on the side stream beside work on the caller's."""
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(x @ x)
    b = x * 3
    join(side)
    return a + b


# ---- streams in closure cells of methods of an object that the compiled function makes


@program("a class uses a stream of its enclosing function in `__init__` and in a method")
def closure_of_a_class(k: Kit) -> Any:
    side, done = k.stream(), torch.cuda.Event()

    class Branch:
        def __init__(self, scale):
            self.stream, self.scale = side, scale

        def run(self, x):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = k.sleep(x @ x) * self.scale
                done.record()
            return y

    def fn(x):
        a = Branch(2).run(x)
        b = x + 1
        done.wait()
        return a + b

    return fn


@program("the streams are in a list, a default argument, a property and a base class")
def closure_of_a_class_with_containers(k: Kit) -> Any:
    sides = [k.stream(), k.stream()]

    class Base:
        def __init__(self):
            self.first = sides[0]

    class Branch(Base):
        def __init__(self):
            super().__init__()
            self.scale = 2

        @property
        def second(self):
            return sides[1]

        def run(self, x, side=sides[1]):
            return _fork_join(side, k.sleep, x) * self.scale + _fork_join(self.first, k.sleep, x)

    def fn(x):
        branch = Branch()
        return branch.run(x) + _fork_join(branch.second, k.sleep, x)

    return fn


@program("a context manager of the user's own enters and leaves a stream of its closure")
def closure_of_a_context_manager(k: Kit) -> Any:
    side = k.stream()

    class OnSide:
        def __enter__(self):
            self.context = torch.cuda.stream(side)
            side.wait_stream(torch.cuda.current_stream())
            self.context.__enter__()

        def __exit__(self, *exception):
            self.context.__exit__(*exception)
            torch.cuda.current_stream().wait_stream(side)

    def fn(x):
        with OnSide():
            y = k.sleep(x @ x)
        return y + x

    return fn


# ---- contexts that are entered by calls


@program("a stack of contexts enters a stream and joins it by a callback")
def exit_stack(side, sleep, /, x):
    with contextlib.ExitStack() as stack:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        stack.callback(current.wait_stream, side)
        stack.enter_context(torch.cuda.stream(side))
        y = sleep(x @ x)
    return y + x


@program("a stack of contexts is closed inside another stream's block, or after it", matrices(2))
def exit_stack_across_blocks(first, second, sleep, /, x, y):
    fork(first, second)
    inner, outer = contextlib.ExitStack(), contextlib.ExitStack()
    with torch.cuda.stream(second):
        inner.enter_context(first)
        a = sleep(x @ x)
        inner.close()
        b = sleep(y @ y)
    outer.enter_context(torch.cuda.stream(second))
    b = b * 2
    with torch.cuda.stream(first):
        a = a * 2
    outer.close()
    join(first, second)
    return a + b


# ---- where streams are kept


@program("a stream is made by a cached property at the first call, and found there at the next")
def cached_property(k: Kit) -> Any:
    class Block(torch.nn.Module):
        @functools.cached_property
        def side(self):
            return k.stream()

        @functools.cached_property
        def other(self):
            return torch.cuda.Stream()

        def forward(self, x):
            return _fork_join(self.side, k.sleep, x) + _fork_join(self.other, k.sleep, x)

    block = Block()
    block.side  # noqa: B018  (a stream that the test may delay is made outside)
    return block


@program("each thread has its own stream, in a dictionary")
def stream_of_the_thread(k: Kit) -> Any:
    streams = {threading.get_ident(): k.stream()}

    def fn(x):
        a = _fork_join(streams[threading.get_ident()], k.sleep, x)
        return _fork_join(streams[threading.current_thread().ident], k.sleep, a.clamp(-2, 2))

    return fn


# ---- what programs ask, and print


@program(
    "the handle of the current stream, the device of a tensor and of an event, the text of a stream",
    finish=joins_all,
    host_reads=True,
)
def asks_and_prints(k: Kit) -> Any:
    side, done, printed = k.stream(), torch.cuda.Event(), []

    def fn(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.device_of(x), torch.cuda.stream(side):
            y = k.sleep(x @ x)
            done.record()
            is_side = torch._C._cuda_getCurrentRawStream(x.device.index) == side.cuda_stream
        printed[:] = [f"on {side}", f"{torch.cuda.current_stream()!r}", str(side)]
        done.wait()
        return y + x, is_side, done.device.index

    return fn


@program("whether a CUDA graph is being captured is the run's answer, not the compiler's", host_reads=True)
def asks_for_capture(side, sleep, /, x):
    y = _fork_join(side, sleep, x)
    with torch.cuda.stream(side):
        inside = torch.cuda.is_current_stream_capturing()
    return y, torch.cuda.is_current_stream_capturing(), inside


# ---- profiler ranges


def settings_of_the_overlay(**settings: Any) -> contextlib.AbstractContextManager[Any]:
    """On stock there are none."""
    forms = ("torch_overlay.config", "torch._overlay.config")
    config = next(filter(None, map(sys.modules.get, forms)), None)
    return config.patch(**settings) if config else contextlib.nullcontext()


def _in_ranges(k: Kit) -> Any:
    side = k.stream()

    @torch.cuda.nvtx.range("branch")
    def branch(x):
        return k.sleep(x @ x) * 2

    def fn(x):
        current = torch.cuda.current_stream()
        a = x + 1
        with torch.cuda.nvtx.range("step {}", 3), torch.profiler.record_function("step"):
            side.wait_stream(current)
            torch.cuda.nvtx.range_push("side")
            with torch.cuda.stream(side):
                y = branch(a)
            torch.cuda.nvtx.range_pop()
            b = a * 3
        torch.cuda.nvtx.mark("joined")
        current.wait_stream(side)
        return y + b, x.add_(b)

    return fn


@program("profiler ranges that nobody wants are left out of the graph")
def ranges_left_out(k: Kit) -> Any:
    return _in_ranges(k)


@program("profiler ranges stay among the launches, and order nothing on the device", frames=True)
def ranges_kept(k: Kit) -> Any:
    compiled = k.compile(_in_ranges(k))

    def fn(x):
        with settings_of_the_overlay(nvtx=True):
            return compiled(x)

    return fn
