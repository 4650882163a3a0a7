"""Several streams write and read parts of one tensor: in place, and side by side where the parts are disjoint."""

import torch

from stream_programs._program import fork, join, matrices, program, reads_input, tensors, whole_numbers


SIZE = 64


@program("each write makes a whole new tensor, and the second waits for the first", matrices(3), finish=reads_input)
def rows_of_an_argument(one, other, sleep, /, out, x, w):
    fork(one, other)
    with torch.cuda.stream(one):
        torch.mm(sleep(x[:32]), w, out=out[:32])
    with torch.cuda.stream(other):
        out[32:].copy_((x[32:] @ w).relu())
    join(one, other)
    return x.new_ones(4)


@program("the same of a tensor that the function makes", matrices(2))
def chunks_of_own_buffer(first, second, third, fourth, sleep, /, x, w):
    streams = first, second, third, fourth
    out = torch.empty(SIZE, SIZE, device=x.device)
    fork(*streams)
    for stream, rows, chunk in zip(streams, x.chunk(4), out.chunk(4)):
        with torch.cuda.stream(stream):
            torch.mm(sleep(rows), w, out=chunk)
    join(*streams)
    return out


@program("columns of a tensor lie between one another in memory", matrices(3), finish=reads_input)
def columns_of_an_argument(one, other, sleep, /, out, x, w):
    fork(one, other)
    with torch.cuda.stream(one):
        out[:, :20] = sleep(x)[:, :20].relu()
        out[:, :20].mul_(2)
    with torch.cuda.stream(other):
        out[:, 20:] = x[:, :44] @ w[:44, :44]
    join(one, other)
    return x.new_ones(4)


@program("elements in turns, of a tensor that was filled before", tensors(whole_numbers(SIZE), whole_numbers(SIZE)))
def elements_in_turns(one, other, sleep, /, x, y):
    out = torch.zeros(2 * SIZE, device=x.device)
    fork(one, other)
    with torch.cuda.stream(one):
        out[::2] = sleep(x) + 1
    with torch.cuda.stream(other):
        out[1::2] = sleep(y) * 3
    join(one, other)
    return out


@program("rows that overlap: the second write comes after the first", matrices(3), finish=reads_input)
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
    finish=reads_input,
)
def slots_of_a_ring(one, other, sleep, /, ring, x, w):
    fork(one, other)
    with torch.cuda.stream(one):
        ring[0] = sleep(x) * 2
    with torch.cuda.stream(other):
        read = ring[1] @ w
    with torch.cuda.stream(one):
        ring[2] += 1
    other.wait_stream(one)
    with torch.cuda.stream(other):
        late = ring[0] + ring[2]
    join(one, other)
    return read, late


@program("parts are written, the whole is read and written, parts are written again", matrices(2))
def parts_around_the_whole(one, other, sleep, /, x, w):
    out = x * 2
    fork(one, other)
    with torch.cuda.stream(one):
        out[:32] += sleep(w)[:32]
    with torch.cuda.stream(other):
        out[32:] -= w[32:]
    join(one, other)
    total = out @ w
    out.mul_(3)
    fork(one, other)
    with torch.cuda.stream(one):
        out[:, :32] = sleep(x)[:, 32:]
    with torch.cuda.stream(other):
        out[:, 32:] = w[:, :32]
    join(one, other)
    return total, out


@program(
    "the parts' sizes are symbols: that they are disjoint can't be shown", matrices(3), finish=reads_input, dynamic=True
)
def rows_of_dynamic_size(one, other, sleep, /, out, x, w):
    half = out.shape[0] // 2
    fork(one, other)
    with torch.cuda.stream(one):
        out[:half] = sleep(x)[:half] + 1
    with torch.cuda.stream(other):
        torch.mm(x[half:], w, out=out[half:])
    join(one, other)
    return x.new_ones(4)


@program("a library's kernel reads other rows of the tensor into which its result goes", matrices(2))
def product_of_rows_beside_it(one, other, sleep, /, x, w):
    out = x + 1
    fork(one, other)
    with torch.cuda.stream(one):
        out[:32] = sleep(out)[32:] @ w
    with torch.cuda.stream(other):
        read = w * 2
    other.wait_stream(one)
    with torch.cuda.stream(other):
        out[32:] = read[32:]
    join(one, other)
    return out
