"""Lifetimes: whose memory a block is, when it may be freed, and who may take it next."""

from typing import Any

import torch

from stream_programs._program import fork, join, joins_all, Kit, matrices, program, tensors, whole_numbers


@program("memory freed on one stream is reused on another: the diamond (#178549)", matrices(1, low=-1, high=1))
def diamond(left, right, sleep, /, x):
    h = sleep(x @ x)
    fork(left, right)
    with torch.cuda.stream(left):
        a = sleep(h.relu()) @ x
    with torch.cuda.stream(right):
        b = sleep(-h) @ x
    join(left, right)
    return a * 2 + b


@program(
    "a buffer whose last reader is on another stream is written again by its own (S2, #168061)",
    matrices(2, low=-1, high=1),
)
def last_reader_on_another_stream(side, sleep, /, x, y):
    h = x @ y
    fork(side)
    with torch.cuda.stream(side):
        a = sleep(h.clone()) + (h @ y)
    b = y @ x
    c = b @ y
    d = c.relu() @ x.sign()
    join(side)
    return a + d


def read_elsewhere(side: torch.cuda.Stream, sleep: Any, make: Any, make_more: Any, x: torch.Tensor) -> Any:
    """Memory of the side stream is last read on the current one, long before the side stream makes more; in eager that
    is a race.
    """
    fork(side)
    with torch.cuda.stream(side):
        a = make(x)
    join(side)
    b = (sleep(x) @ a).relu()
    del a
    with torch.cuda.stream(side):
        c = make_more(x)
    join(side)
    fork(side)
    return b, c


@program(
    "memory of a side stream, last read on the current one, is taken by the side stream again",
    matrices(1, low=-1, high=1),
    ordered=True,
)
def side_memory_read_elsewhere(side, sleep, /, x):
    return read_elsewhere(side, sleep, lambda x: x @ x, lambda x: (x.t() @ x) @ x, x)


@program(
    "outputs of one kernel, read on another stream, are taken for memory of the current one",
    tensors(whole_numbers(64, 256, low=-50, high=50)),
    ordered=True,
)
def several_outputs_read_elsewhere(side, sleep, /, x):
    fork(side)
    with torch.cuda.stream(side):
        first, _ = torch.topk(x, 64)
    join(side)
    a = (sleep(x[:, :64]) @ first).relu()
    del first
    with torch.cuda.stream(side):
        second, _ = torch.topk(x + 1, 64)
        third, _ = torch.topk(-x, 64)
        b = second + third
    join(side)
    fork(side)
    return a, b


@program("outputs of a custom operator are taken for memory of the current stream", ordered=True)
def operator_output_read_elsewhere(side, sleep, /, x):
    double = torch.ops.overlay_test.double
    return read_elsewhere(side, sleep, double, lambda x: double(double(x)), x)


@program("results of a nested region, read on another stream", matrices(1, low=-1, high=1), ordered=True)
def region_output_read_elsewhere(k: Kit) -> Any:
    side, sleep, weight = k.stream(), k.sleep, torch.sign(k.parameter(64, 64))

    @torch.compiler.nested_compile_region
    def block(x):
        return (x @ weight).clamp(-2, 2)

    return lambda x: read_elsewhere(side, sleep, block, lambda x: block(block(x)), x)


@program("memory of the current stream, handed to a user's Triton kernel on another as its target", matrices(2))
def out_variant_on_side_stream(side, sleep, /, x, y):
    target = torch.empty_like(x)
    fork(side)
    with torch.cuda.stream(side):
        torch.mul(sleep(x), 3, out=target)
    b = y * 2
    join(side)
    return target @ b


@program("an input written by the frame that nobody reads afterwards, and whose memory is free", matrices(2))
def short_lived_buffers(first, second, third, sleep, /, x, y):
    total = y
    for i in range(6):
        side = (first, second, third)[i % 3]
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(total) * 2
            b = (a - x).clamp(-9, 9)
        join(side)
        total = b - total
    return total


@program("several calls alive at once: outputs of the first are read after the second", frames=True)
def outputs_of_two_calls(k: Kit) -> Any:
    side, sleep = k.stream(), k.sleep

    @k.compile
    def inner(x):
        fork(side)
        with torch.cuda.stream(side):
            a = sleep(x) @ x
        b = x * 2
        join(side)
        return a, b

    def step(x):
        a, b = inner(x)
        if k.compiler is not None:
            a, b = a.clone(), b.clone()
        c, d = inner(x + 1)
        return a - c, b - d

    return step


@program(
    "an output written on a stream that the caller doesn't join, next to one that it does",
    matrices(2),
    finish=joins_all,
)
def one_joined_one_not(joined, loose, sleep, /, x, y):
    fork(joined, loose)
    with torch.cuda.stream(joined):
        a = sleep(x) @ y
    with torch.cuda.stream(loose):
        b = sleep(sleep(y)) * 3
    join(joined)
    return a + 1, b


@program(
    "memory of the current stream, updated in place on another: functional code makes new memory of that stream's, "
    "which eager never frees",
    matrices(2, low=-1, high=1),
)
def updated_in_place_on_side_stream(side, sleep, /, x, y):
    total = x @ y
    fork(side)
    with torch.cuda.stream(side):
        total.add_(sleep(y) @ y)
    join(side)
    return total @ x
