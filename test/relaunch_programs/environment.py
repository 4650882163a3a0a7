"""Environment: what is around the call. Streams, captures, pools, allocator settings, memory that runs out."""

import contextlib
from typing import Any

import torch
from torch import nn

from relaunch_programs._program import Kit, program
from relaunch_programs.outputs import mix
from relaunch_programs.parameters import network


@program("called on a stream that is not the default one", launches=6)
def on_another_stream(k: Kit) -> None:
    f = k.compile(lambda x: (mix(x), x.sum(0)))
    stream = k.stream()
    for _ in k.steps():
        x = k.randn(64, 64)
        with k.on(stream):
            y = f(x)
        k.see("outputs", y)


@program("the current stream changes from call to call, and memory is handed from one to the next", launches=8)
def streams_take_turns(k: Kit) -> None:
    f = k.compile(lambda x, y: (mix(x) + y, (x * y).sum(1)))
    streams = [None, k.stream(), k.stream()]
    state = k.randn(64, 64)
    for i in k.steps(15):
        x = k.randn(64, 64)
        with k.on(streams[i % 3]):
            state, total = f(x, state)
            del x  # its memory belongs to the default stream
        state = state.tanh()
        k.see("outputs", (state, total))


@program("two launches of one graph overlap on two streams", launches=8)
def launches_without_order(k: Kit) -> None:
    f = k.compile(lambda x: (torch.tanh(x @ x / 16) @ x).relu().sum(1))
    first, second = k.stream(), k.stream()
    for _ in k.steps(10):
        x, y = k.randn(256, 256), k.randn(256, 256)
        for stream in filter(None, (first, second)):
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(first) if first else contextlib.nullcontext():
            a = f(x)
        with torch.cuda.stream(second) if second else contextlib.nullcontext():
            b = f(y)
        for stream in filter(None, (first, second)):
            torch.cuda.current_stream().wait_stream(stream)
        k.see("outputs", (a, b))


def capture(k: Kit, fn: Any) -> tuple[Any, Any]:
    """The user's own CUDA graph of fn(): how to replay it, and its outputs. Without a GPU, fn() again."""
    if not k.gpu:
        outputs = fn()

        def again() -> None:
            results = fn()
            with torch.no_grad():
                for old, new in zip(outputs, results):
                    old.copy_(new)

        return again, outputs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = fn()
    return graph.replay, outputs


def launches() -> int:
    return torch._dynamo.utils.counters["torch_overlay"]["cudagraph_relaunches"]


@program("called while the user captures a graph: it runs inline, without a launch of its own", launches=4)
def inside_a_capture(k: Kit) -> None:
    f = k.compile(lambda x: (mix(x), x.sum(0)))
    for _ in k.steps(6):
        k.see("before", f(k.randn(64, 64)))
    x = k.randn(64, 64)
    before = launches()
    replay, (y, total) = capture(k, lambda: f(f(x)[0]))
    k.see("own launches", launches() - before)
    for _ in k.steps():
        x.copy_(k.randn(64, 64))
        replay()
        k.see("replayed", (y, total))
        k.see("beside", f(k.randn(64, 64)))


@program("the user captures a function that was called once, and never captured by us", launches=0)
def inside_a_capture_early(k: Kit) -> None:
    f = k.compile(lambda x: (mix(x), x.sum(0)))
    x = k.randn(64, 64)
    f(x)
    replay, outputs = capture(k, lambda: f(x))
    for _ in k.steps(4):
        x.copy_(k.randn(64, 64))
        replay()
        k.see("replayed", outputs)
    for _ in k.steps():
        k.see("beside", f(k.randn(64, 64)))


@program("the user captures forward and backward", launches=8)
def training_inside_a_capture(k: Kit) -> None:
    model = k.module(network())
    parameters = list(model.parameters())
    f = k.compile(model)
    x = k.randn(16, 32)

    def step() -> Any:
        return torch.autograd.grad(f(x).square().mean(), parameters)

    # As the documentation of torch.cuda.graph asks: warmed up on a side stream.
    with k.on(k.stream()):
        for _ in range(6):
            step()
    replay, gradients = capture(k, step)
    for _ in k.steps(4):
        x.copy_(k.randn(16, 32))
        replay()
        k.see("gradients", gradients)


@program("allocations of the region come from the pool that the user chose, as without a graph", launches=6)
def in_a_pool(k: Kit) -> None:
    f = k.compile(lambda x: (mix(x), x.sum(0)))
    if not k.gpu:
        for _ in k.steps():
            k.see("outputs", (f(k.randn(64, 64)), True))
        return
    pool = torch.cuda.MemPool()
    for i in k.steps(12):
        x = k.randn(64, 64)
        if i % 2:
            with torch.cuda.use_mem_pool(pool):
                y = f(x)
            address = y[0].data_ptr()
            inside = any(s["address"] <= address < s["address"] + s["total_size"] for s in pool.snapshot())
        else:
            y, inside = f(x), True
        k.see("outputs, and whether they lie where they should", (y, inside))
        del x, y


@program("the cache of the allocator is emptied between the calls", launches=8)
def emptied_cache(k: Kit) -> None:
    model = k.module(network())
    f = k.compile(model)
    for _ in k.steps():
        y = f(k.randn(16, 32))
        if k.gpu:
            torch.cuda.empty_cache()
        y.square().mean().backward()
        if k.gpu:
            torch.cuda.empty_cache()
        k.see("output and gradients", (y, [p.grad for p in model.parameters()]))
        model.zero_grad()


def run_out(k: Kit, warm: int, train: bool = False) -> None:
    """`warm` calls, two that run out of memory, and some more."""
    n = 4096 if k.gpu else 64
    weight = (k.randn(n, 1) * k.randn(1, n) / n).requires_grad_(train)
    f = k.compile(lambda x: torch.tanh(x @ weight) @ x.t() / n)

    def call() -> Any:
        y = f(k.randn(n, 1).expand(n, n) * 1.0)
        if train:
            y.square().mean().backward()
            weight.grad = None
        return y[:4, :4].detach().clone()

    for _ in k.steps(warm):
        k.see("before", call())
    with k.little_memory(90):  # less than the two products need, 64 MiB each
        k.raises("out of memory", call)
        k.raises("out of memory again", call)
    for _ in k.steps():
        k.see("after", call())


@program("memory runs out in the first call", launches=4, alone=True, loose=10)
def out_of_memory_at_first(k: Kit) -> None:
    run_out(k, 0)


@program("memory runs out in the call that captures", launches=4, alone=True, loose=10)
def out_of_memory_at_capture(k: Kit) -> None:
    run_out(k, 1)


@program("memory runs out in a relaunch, after some pointers were patched", launches=6, alone=True, loose=10)
def out_of_memory_at_relaunch(k: Kit) -> None:
    run_out(k, 5)


@program("memory runs out in training", launches=6, alone=True, loose=10)
def out_of_memory_in_training(k: Kit) -> None:
    run_out(k, 4, train=True)


def session(k: Kit) -> None:
    """A bit of everything, for unusual settings of the whole process."""
    model = k.module(network())
    f, g = k.compile(model), k.compile(lambda x, s: (mix(x), s.add_(x.sum(0))))
    state = torch.zeros(64, device=k.device)
    held = []
    for _ in k.steps(10):
        y = f(k.randn(16, 32))
        y.square().mean().backward()
        held.append((y, [p.grad for p in model.parameters()], g(k.randn(64, 64), state)[0]))
        model.zero_grad()
    k.see("all", (held, state))


@program(
    "segments of the allocator that grow",
    launches=12,
    alone=True,
    env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
)
def expandable_segments(k: Kit) -> None:
    session(k)
    if k.gpu:
        k.see("expandable", any(s.get("is_expandable") for s in torch.cuda.memory_snapshot()))


@program(
    "the driver's own asynchronous allocator, which knows no pools",
    launches=0,
    refusals=True,
    alone=True,
    env={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
)
def asynchronous_allocator(k: Kit) -> None:
    session(k)


@program("launches are blocking", launches=12, alone=True, env={"CUDA_LAUNCH_BLOCKING": "1"})
def blocking_launches(k: Kit) -> None:
    session(k)


@program("kernels are loaded at once, not lazily", launches=12, alone=True, env={"CUDA_MODULE_LOADING": "EAGER"})
def eager_loading(k: Kit) -> None:
    session(k)


@program("generated code allocates without Python wrappers of partitions", launches=12)
def without_partitions(k: Kit) -> None:
    with torch._inductor.config.patch(graph_partition=False):
        session(k)


@program("under the profiler", launches=12)
def profiled(k: Kit) -> None:
    with torch.profiler.profile():
        session(k)


@program("memory history is recorded", launches=12)
def memory_history(k: Kit) -> None:
    if k.gpu:
        torch.cuda.memory._record_memory_history(max_entries=1000)
    try:
        session(k)
    finally:
        if k.gpu:
            torch.cuda.memory._record_memory_history(enabled=None)


@program(
    "deterministic algorithms, which also fill memory that is not initialised",
    launches=12,
    alone=True,
    env={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
)
def deterministic(k: Kit) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        session(k)
    finally:
        torch.use_deterministic_algorithms(False)


@program("max-autotune: templates and their workspaces", launches=4, alone=True, loose=4, gpu_only=True)
def max_autotune(k: Kit) -> None:
    model = k.module(nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64)), torch.bfloat16)
    mode = {"eager": None, "plain": "max-autotune-no-cudagraphs", "graphs": "max-autotune"}[k.side]
    f = model if mode is None else torch.compile(model, mode=mode)
    with torch.no_grad():
        for _ in k.steps():
            k.see("output", f(k.randn(64, 128, dtype=torch.bfloat16)))


@program("graphs are asked for by an option, not by a mode", launches=6)
def by_option(k: Kit) -> None:
    def fn(x):
        return mix(x), x.sum(0)

    f = torch.compile(fn, options={"triton.cudagraphs": True}) if k.graphs else k.compile(fn)
    for _ in k.steps():
        k.see("outputs", f(k.randn(64, 64)))


@program("the step is marked by users of upstream's graphs", launches=6)
def step_marked(k: Kit) -> None:
    f = k.compile(lambda x: (mix(x), x.sum(0)))
    held = []
    for _ in k.steps():
        torch.compiler.cudagraph_mark_step_begin()
        held.append(f(k.randn(64, 64)))
    k.see("outputs", held)


@program("the current device is not the one of the tensors", launches=6)
def another_device(k: Kit) -> None:
    if k.gpu and torch.cuda.device_count() > 1:
        k.device = "cuda:1"
    f = k.compile(lambda x: (mix(x), x.sum(0)))
    for _ in k.steps():
        k.see("outputs", f(k.randn(64, 64)))
