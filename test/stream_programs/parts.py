"""Several streams write and read parts of one tensor: in place, and side by side where the parts are disjoint."""

from __future__ import annotations

from typing import Any

import torch

from stream_programs._program import Kit, matrices, program, tensors, whole_numbers


SIZE = 64


def _reads_first_input(instance, inputs, outputs):
    """A caller that was promised, by the joins inside the function, that it may read the updated input at once."""
    return outputs, inputs[0].clone()


def _forked(k: Kit, count: int) -> tuple[list[Any], Any, Any]:
    streams = [k.stream() for _ in range(count)]

    def fork():
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())

    def join():
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    return streams, fork, join


@program(
    "each write makes a whole new tensor, and the second waits for the first", matrices(3), finish=_reads_first_input
)
def rows_of_an_argument(k: Kit) -> Any:
    (one, other), fork, join = _forked(k, 2)
    sleep = k.sleep

    def fn(out, x, w):
        fork()
        with torch.cuda.stream(one):
            torch.mm(sleep(x[:32]), w, out=out[:32])
        with torch.cuda.stream(other):
            out[32:].copy_((x[32:] @ w).relu())
        join()
        return x.new_ones(4)

    return fn


@program("the same of a tensor that the function makes", matrices(2))
def chunks_of_own_buffer(k: Kit) -> Any:
    streams, fork, join = _forked(k, 4)
    sleep = k.sleep

    def fn(x, w):
        out = torch.empty(SIZE, SIZE, device=x.device)
        fork()
        for stream, rows, chunk in zip(streams, x.chunk(4), out.chunk(4)):
            with torch.cuda.stream(stream):
                torch.mm(sleep(rows), w, out=chunk)
        join()
        return out

    return fn


@program("columns of a tensor lie between one another in memory", matrices(3), finish=_reads_first_input)
def columns_of_an_argument(k: Kit) -> Any:
    (one, other), fork, join = _forked(k, 2)
    sleep = k.sleep

    def fn(out, x, w):
        fork()
        with torch.cuda.stream(one):
            out[:, :20] = sleep(x)[:, :20].relu()
            out[:, :20].mul_(2)
        with torch.cuda.stream(other):
            out[:, 20:] = x[:, :44] @ w[:44, :44]
        join()
        return x.new_ones(4)

    return fn


@program("elements in turns, of a tensor that was filled before", tensors(whole_numbers(SIZE), whole_numbers(SIZE)))
def elements_in_turns(k: Kit) -> Any:
    (one, other), fork, join = _forked(k, 2)
    sleep = k.sleep

    def fn(x, y):
        out = torch.zeros(2 * SIZE, device=x.device)
        fork()
        with torch.cuda.stream(one):
            out[::2] = sleep(x) + 1
        with torch.cuda.stream(other):
            out[1::2] = sleep(y) * 3
        join()
        return out

    return fn


@program("rows that overlap: the second write comes after the first", matrices(3), finish=_reads_first_input)
def overlapping_rows(one, other, sleep, /, out, x, w):
    one.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(one):
        out[:40] = sleep(x)[:40] + 1
    other.wait_stream(one)
    with torch.cuda.stream(other):
        torch.mm(x[32:], w, out=out[32:])
    torch.cuda.current_stream().wait_stream(other)
    return x.new_ones(4)


@program(
    "slots of a ring: one is filled while another is read, and the filled one is read later",
    tensors(whole_numbers(4, SIZE, SIZE), whole_numbers(SIZE, SIZE), whole_numbers(SIZE, SIZE)),
    finish=_reads_first_input,
)
def slots_of_a_ring(k: Kit) -> Any:
    (one, other), fork, join = _forked(k, 2)
    sleep = k.sleep

    def fn(ring, x, w):
        fork()
        with torch.cuda.stream(one):
            ring[0] = sleep(x) * 2
        with torch.cuda.stream(other):
            read = ring[1] @ w
        with torch.cuda.stream(one):
            ring[2] += 1
        other.wait_stream(one)
        with torch.cuda.stream(other):
            late = ring[0] + ring[2]
        join()
        return read, late

    return fn


@program("parts are written, the whole is read and written, parts are written again", matrices(2))
def parts_around_the_whole(k: Kit) -> Any:
    (one, other), fork, join = _forked(k, 2)
    sleep = k.sleep

    def fn(x, w):
        out = x * 2
        fork()
        with torch.cuda.stream(one):
            out[:32] += sleep(w)[:32]
        with torch.cuda.stream(other):
            out[32:] -= w[32:]
        join()
        total = out @ w
        out.mul_(3)
        fork()
        with torch.cuda.stream(one):
            out[:, :32] = sleep(x)[:, 32:]
        with torch.cuda.stream(other):
            out[:, 32:] = w[:, :32]
        join()
        return total, out

    return fn


@program(
    "the parts' sizes are symbols: that they are disjoint can't be shown",
    matrices(3),
    finish=_reads_first_input,
    dynamic=True,
)
def rows_of_dynamic_size(k: Kit) -> Any:
    (one, other), fork, join = _forked(k, 2)
    sleep = k.sleep

    def fn(out, x, w):
        half = out.shape[0] // 2
        fork()
        with torch.cuda.stream(one):
            out[:half] = sleep(x)[:half] + 1
        with torch.cuda.stream(other):
            torch.mm(x[half:], w, out=out[half:])
        join()
        return x.new_ones(4)

    return fn


@program("a library's kernel reads other rows of the tensor into which its result goes", matrices(2))
def product_of_rows_beside_it(k: Kit) -> Any:
    (one, other), fork, join = _forked(k, 2)
    sleep = k.sleep

    def fn(x, w):
        out = x + 1
        fork()
        with torch.cuda.stream(one):
            out[:32] = sleep(out)[32:] @ w
        with torch.cuda.stream(other):
            read = w * 2
        other.wait_stream(one)
        with torch.cuda.stream(other):
            out[32:] = read[32:]
        join()
        return out

    return fn
