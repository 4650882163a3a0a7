"""Copies between device and host that don't block the host, into memory that the program names.

Each of `COPIES` is made twice by its program: on a side stream, and on the caller's beside it. Host memory is pinned.
In eager the call returns at once, but for columns, which it gathers on the host; compiled code must copy from and to
the same memory, on the same stream.
"""

from typing import Any

import torch

from stream_programs._program import fork, join, Kit, program, synchronizes, tensors, whole_numbers


ROWS, COLUMNS = 16, 64


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def filled(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    copy(target, source)
    return target


COPIES: dict[str, Any] = {
    # to the device
    "to_input": lambda device, host, x: copy(device, host),
    "to_row_of_input": lambda device, host, x: copy(device[1], host[2]),
    "to_own_buffer": lambda device, host, x: filled(torch.empty_like(x), host),
    # to the host
    "to_host_input": lambda device, host, x: copy(host, x),
    "to_row_of_ring": lambda device, host, x: copy(host[1], x[0]),
    "to_pinned_buffer": lambda device, host, x: filled(torch.empty(x.shape, pin_memory=True), x),
    "to_pinned_buffer_like_it": lambda device, host, x: filled(torch.empty_like(x, device="cpu", pin_memory=True), x),
}


def case(body: Any) -> Any:
    COPIES[body.__name__] = body
    return body


@case
def to_columns_of_input(device, host, x):
    n = x.shape[1] // 2
    copy(device[:, 1:n], host[:, 2 : n + 1])


@case
def to_part_of_flat_input(device, host, x):
    n = x.numel() // 2
    copy(device.view(-1)[5 : n + 3], host.view(-1)[2:n])


@case
def to_columns_of_host_input(device, host, x):
    n = x.shape[1] // 2
    copy(host[:, 1:n], x[:, 2 : n + 1])


@case
def to_rows_of_input(device, host, x):
    copy(device[1:3], host[2:4])
    return device * 2


@case
def to_rows_of_own_buffer(device, host, x):
    buffer = torch.zeros_like(x)
    copy(buffer[1:3], host[2:4])
    copy(buffer[5], host[0])
    return buffer


@case
def list_to_device(device, host, x):
    torch._foreach_copy_([device[0], device[1:3]], [host[3], host[4:6]], non_blocking=True)


@case
def to_rows_of_host_input(device, host, x):
    copy(host[1:3], x[2:4])
    copy(host[5:7], x[0:2])


@case
def to_rows_of_pinned_buffer(device, host, x):
    buffer = torch.zeros(x.shape, pin_memory=True)
    copy(buffer[1:3], x[2:4])
    copy(buffer[5], x[0])
    return buffer


@case
def list_to_host(device, host, x):
    torch._foreach_copy_([host[0], host[1:3]], [x[3], x[4:6]], non_blocking=True)


def _and_memory(instance: Any, inputs: Any, outputs: Any) -> Any:
    synchronizes(instance, inputs, outputs)
    return outputs, [tensor.clone() for tensor in inputs[1:]]


_PINNED = whole_numbers(ROWS, COLUMNS, pinned=True)
_ON_DEVICE = whole_numbers(ROWS, COLUMNS)
_INPUTS = tensors(_ON_DEVICE, _ON_DEVICE, _ON_DEVICE, _PINNED, _PINNED)


def _register(name: str, body: Any) -> None:
    def build(k: Kit) -> Any:
        side, sleep = k.stream(), k.sleep

        def fn(x, device, own_device, host, own_host):
            fork(side)
            with torch.cuda.stream(side):
                a = body(device, host, sleep(x) * 2)
            b = body(own_device, own_host, sleep(x) * 3)
            c = x @ x.t()
            join(side)
            return a, b, c

        return fn

    build.__name__ = f"copy_{name}"
    program("a copy between device and host blocks the host", _INPUTS, finish=_and_memory, host_reads=True)(build)


for _name, _body in COPIES.items():
    _register(_name, _body)


# ---- around such copies


def _relative(hazard: str, inputs: Any = None, **fields: Any) -> Any:
    fields = {"finish": _and_memory, "host_reads": True, **fields}
    return program(hazard, inputs or tensors(_ON_DEVICE, _ON_DEVICE, _PINNED, _PINNED), **fields)


@_relative(
    "a copy that converts is made through device memory, in eager, too; here it was converted on the host",
    tensors(
        _ON_DEVICE,
        whole_numbers(ROWS, COLUMNS, dtype=torch.float16),
        _PINNED,
        whole_numbers(ROWS, COLUMNS, dtype=torch.float16, pinned=True),
    ),
)
def converting_copies(side, sleep, /, x, device, host, half):
    fork(side)
    with torch.cuda.stream(side):
        device.copy_(host, non_blocking=True)
        half[1:3].copy_(sleep(x)[1:3] * 2, non_blocking=True)
    join(side)
    return device + 1


@_relative("a row is repeated, and a matrix turned, on its way")
def copies_of_other_shapes(side, sleep, /, x, device, host, out):
    fork(side)
    with torch.cuda.stream(side):
        device.copy_(host[3], non_blocking=True)
        out.t().copy_(sleep(x).t() * 2, non_blocking=True)
        turned = torch.empty(COLUMNS, ROWS, device="cuda")
        turned.t().copy_(host, non_blocking=True)
    join(side)
    return device + 1, turned


@_relative("rows of one ring are filled on two streams, and the host reads each after its event")
def ring_of_two_streams(one, two, sleep, /, x, device, host, ring):
    done = []
    for i, side in enumerate((one, two, one)):
        fork(side)
        with torch.cuda.stream(side):
            ring[i].copy_((sleep(x) * (i + 2))[i], non_blocking=True)
            done.append(side.record_event())
    sums = []
    for i, event in enumerate(done):
        event.synchronize()
        sums.append(ring[i] + 1)
    return sums, x + device


@_relative("the host writes another row of the memory that a copy fills")
def host_writes_beside_copy(side, sleep, /, x, device, host, ring):
    fork(side)
    with torch.cuda.stream(side):
        ring[1:3].copy_(sleep(x)[1:3] * 2, non_blocking=True)
    ring[5] = 7.0
    join(side)
    side.synchronize()
    return ring[1:3] + ring[5]


@_relative("what was in the memory is read on another stream before the copy, and after it on a third")
def read_before_and_after(side, other, sleep, /, x, device, host, out):
    fork(other)
    with torch.cuda.stream(other):
        before = sleep(device) * 2
    side.wait_stream(other)
    with torch.cuda.stream(side):
        device[2:5].copy_(host[2:5], non_blocking=True)
        device[0].copy_(host[7], non_blocking=True)
    join(side)
    return before, device * 3


@_relative("the memory is returned, a copy of it, and one of what it was")
def copied_memory_returned(side, sleep, /, x, device, host, out):
    fork(side)
    with torch.cuda.stream(side):
        before = device.clone()
        device.copy_(host, non_blocking=True)
        buffer = torch.zeros_like(x)
        buffer[0].copy_(host[0], non_blocking=True)
        first = buffer.clone()
        buffer[1].copy_(host[1], non_blocking=True)
        after = sleep(device).clone()
    join(side)
    return before, device, device.clone(), after, first, buffer


@_relative("a copy into a tensor that was computed")
def copy_into_computed(side, sleep, /, x, device, host, out):
    fork(side)
    with torch.cuda.stream(side):
        y = sleep(x).relu()
        y[1:3].copy_(host[1:3], non_blocking=True)
        z = y + 1
        z.copy_(host, non_blocking=True)
    join(side)
    return y * 2, z


@_relative("offloaded to the host and loaded again: the host has no part in that")
def offloaded_and_loaded(out_stream, in_stream, sleep, /, x, device, host, ring):
    y = sleep(x) * 2
    fork(out_stream)
    with torch.cuda.stream(out_stream):
        ring[3:6].copy_(y[3:6], non_blocking=True)
    in_stream.wait_stream(out_stream)
    with torch.cuda.stream(in_stream):
        device[1:4].copy_(ring[3:6], non_blocking=True)
    join(in_stream)
    return device + y


@_relative("what is copied is updated in place afterwards")
def source_updated_after_copy(side, sleep, /, x, device, host, out):
    fork(side)
    with torch.cuda.stream(side):
        out.copy_(sleep(device), non_blocking=True)
        device[1:3].copy_(host[1:3], non_blocking=True)
        out[4].copy_(device[4], non_blocking=True)
    join(side)
    device.add_(1)
    x.mul_(2)


@_relative("host memory that the graph pins and fills is the copy's source")
def staged_on_the_host(side, sleep, /, x, device, host, out):
    staging = torch.empty(4, COLUMNS, pin_memory=True)
    staging[0:2] = host[0:2] * 2
    staging[2:4] = out[2:4]
    fork(side)
    with torch.cuda.stream(side):
        device[1:5].copy_(staging, non_blocking=True)
        y = sleep(device) * 2
    join(side)
    return y


@_relative(
    "pageable memory: eager's copy returns when it has been read, or filled",
    tensors(_ON_DEVICE, _ON_DEVICE, whole_numbers(ROWS, COLUMNS, on="cpu"), whole_numbers(ROWS, COLUMNS, on="cpu")),
)
def pageable_memory(side, sleep, /, x, device, host, out):
    fork(side)
    with torch.cuda.stream(side):
        device.copy_(host, non_blocking=True)
        out[1:3].copy_(sleep(x)[1:3] * 2, non_blocking=True)
        own = torch.zeros(ROWS, COLUMNS)
        own[0:2].copy_(x[0:2], non_blocking=True)
    join(side)
    return device + 1, own


@_relative("sizes that are known when the code runs", dynamic=True)
def copies_of_dynamic_shape(side, sleep, /, x, device, host, out):
    n = x.shape[0] // 2
    fork(side)
    with torch.cuda.stream(side):
        device[1 : n + 1].copy_(host[:n], non_blocking=True)
        out[n:].copy_((sleep(x) * 2)[n:], non_blocking=True)
        out.view(-1)[3:n].copy_(x.view(-1)[: n - 3], non_blocking=True)
        own = torch.empty_like(x)
        own.copy_(host, non_blocking=True)
        pinned = torch.empty(n, x.shape[1], pin_memory=True)
        pinned.copy_(own[n:], non_blocking=True)
        computed = x.relu()
        computed[:n].copy_(host[n:], non_blocking=True)
    join(side)
    return device * 2, own, pinned, computed
