"""Functions whose whole body runs on one side stream.

No kernel of theirs belongs on the caller's stream, and one event at each end suffices. What the user doesn't write
himself, the scatters of an update through views, write-backs and the nodes that passes make, is the side stream's, too:
otherwise the caller waits for more, and who waits for the side stream alone reads too early.
"""

from collections.abc import Callable
from typing import Any

import torch

from stream_programs._program import fork, join, Kit, MakeInputs, matrices, Program, program, tensors, whole_numbers
from stream_programs.training import training, trains


def on_side(side: torch.cuda.Stream, body: Callable[..., Any]) -> Callable[..., Any]:
    """After the caller's work and before what the caller does next."""

    def fn(*inputs):
        fork(side)
        with torch.cuda.stream(side):
            result = body(*inputs)
        join(side)
        return result

    return fn


def until_event(side: torch.cuda.Stream, body: Callable[..., Any]) -> Callable[..., Any]:
    """The host waits for an event of the side stream; the caller's stream doesn't."""

    def fn(*inputs):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            result = body(*inputs)
            done = side.record_event()
        done.synchronize()
        return result

    return fn


def one_stream(hazard: str, inputs: MakeInputs, around: Callable[..., Any] = on_side, **fields: Any) -> Any:
    """Decorates the body of a program, whose first parameter is `sleep`."""

    def register(body: Callable[..., Any]) -> Program:
        def build(k: Kit) -> Any:
            sleep = k.sleep
            return around(k.stream(), lambda *inputs: body(sleep, *inputs))

        build.__name__, build.__module__ = body.__name__, body.__module__
        return program(hazard, inputs, **fields)(build)

    return register


batches = tensors(*[whole_numbers(4, 32, 32)] * 2)
cached = tensors(whole_numbers(4, 16, 32), whole_numbers(4, 32), whole_numbers(4, 32))


# ---- updates through chained views


@one_stream("the scatters of updates through two views run on the caller's stream", batches)
def rows_of_rows_updated(sleep, x, y):
    t = torch.bmm(sleep(x), y)
    t[0][1:3].mul_(2)
    t[1][2:4].add_(1)
    return t


@one_stream(
    "an event reports a tensor to the host before the last scatter into it", batches, until_event, host_reads=True
)
def rows_of_rows_updated_until_event(sleep, x, y):
    t = torch.bmm(sleep(x), y)
    t[0][1:3].mul_(2)
    t[1][2:4].add_(1)
    return t


@one_stream("one element is updated twice through one view", matrices(2))
def element_updated_twice(sleep, x, y):
    t = sleep(x) @ y
    t[0, 0].sub_(y[1, 1]).mul_(2)
    return t


@one_stream("an input is updated through chained views, and read as a whole", matrices(2))
def input_updated_through_views(sleep, x, y):
    x[0][1:3].mul_(sleep(y)[0][1:3])
    x[1:4][:, 2:4].add_(y[0, 0])
    return x + 1


@one_stream("the slots of a cache are set and added to", cached)
def cache_slots_updated(sleep, cache, new, more):
    cache[:, 1] = sleep(new)
    cache[:, 2] += more
    return cache.sum(1)


@one_stream("a value of an operator with two results is updated in place", matrices(2))
def result_of_sort_updated(sleep, x, y):
    values, order = torch.sort(sleep(x), stable=True)
    values.add_(y)
    values[0][1:5].mul_(2)
    return values, order


@one_stream("diagonals and strided views of a product are updated", matrices(2))
def diagonals_updated(sleep, x, y):
    t = sleep(x) @ y
    t.diagonal().mul_(2)
    t[1:9].diagonal()[2:4].add_(1)
    t.as_strided((4, 4), (65, 1), 3).sub_(1)
    return t


@one_stream("elements that another tensor names are updated through a view", matrices(2))
def indexed_rows_updated(sleep, x, y):
    t = sleep(x) @ y
    rows = torch.arange(0, 6, 2, device="cuda")
    t[rows] = y[rows]
    t[:, 1:][:, rows] += 1
    t[2][rows] = t[3][rows] * 2
    t[1][t[1] > 0] = 1
    return t


@one_stream("an updated view is returned beside its base", matrices(2))
def updated_view_returned(sleep, x, y):
    t = sleep(x) @ y
    part = t[2:10]
    part[1][3:7].add_(y[0][3:7])
    t[0:4][:, 5].mul_(3)
    return t, part + 1


@program("two streams update parts of one tensor through chained views, one after the other", batches)
def rows_updated_on_two_streams(one, two, sleep, /, x, y):
    current = torch.cuda.current_stream()
    one.wait_stream(current)
    with torch.cuda.stream(one):
        t = torch.bmm(sleep(x), y)
        t[0][1:3].mul_(2)
    two.wait_stream(one)
    with torch.cuda.stream(two):
        t[1][2:4].add_(1)
        t[0][2:6].sub_(x[1][2:6])
    current.wait_stream(two)
    t.record_stream(two)
    t.record_stream(current)
    return t + 1


# ---- operators that passes take apart


@one_stream("random numbers and masks are drawn by nodes that a pass makes", matrices(1))
def random_numbers_drawn(sleep, x):
    noise = torch.rand_like(sleep(x))
    kept = torch.nn.functional.dropout(torch.ones_like(x), 0.5)
    return (noise >= 0).all(), ((kept == 0) | (kept == 2)).all(), x + 1


@one_stream("operators that write their arguments become functional and are taken apart again", matrices(2))
def written_by_operators(sleep, x, y):
    t = sleep(x) @ y
    torch.ops.overlay_test.add_to(t, y)
    torch.ops.overlay_test.add_to(t[0:32], y[0:32])
    t[1][2:6].mul_(2)
    torch._foreach_add_([t, x], 1)
    return t


@one_stream("constants are folded, and zeros and ones are taken out", matrices(1))
def constants_folded(sleep, x):
    ones = torch.ones(64, 64, device="cuda")
    full = (ones + 1) * 2
    return sleep(x) * ones + 0, full, torch.zeros_like(x).add_(3)


# ---- training


@training("the backward of updates through chained views", batches)
def train_rows_of_rows_updated(k: Kit) -> Any:
    weight = k.parameter(4, 32, 32).requires_grad_()

    def body(x, y):
        t = torch.bmm(k.sleep(x), weight)
        t[0][1:3].mul_(2)
        t[1][2:4].add_(y[1][2:4])
        return t.relu().sum()

    return trains(k, on_side(k.stream(), body), weight)


@training("a mask that the partitioner moves into the forward, and the pieces of a split that are joined", matrices(1))
def train_relu_of_pieces(k: Kit) -> Any:
    weight = k.parameter(64, 64).requires_grad_()

    def body(x):
        a, b = (k.sleep(x) @ weight).relu().split(32)
        return (torch.cat([a * 2, b[1:31] + a[1:31]]) * a[0]).sum()

    return trains(k, on_side(k.stream(), body), weight)
