"""Copies between device and host that don't block the host, into memory that the program names.

Each of `COPIES` is made twice by its program: on a side stream, and on the caller's beside it. Host memory is pinned.
In eager the call returns at once; compiled code must copy from and to the same memory, on the same stream.
"""

from __future__ import annotations

from typing import Any

import torch

from stream_programs._program import Kit, program, synchronizes, tensors, whole_numbers


ROWS, COLUMNS = 16, 64

COPIES: dict[str, Any] = {}


def copy(body: Any) -> Any:
    COPIES[body.__name__] = body
    return body


# ---- to the device


@copy
def to_input(device, host, x):
    device.copy_(host, non_blocking=True)


@copy
def to_rows_of_input(device, host, x):
    device[1:3].copy_(host[2:4], non_blocking=True)
    return device * 2


@copy
def to_row_of_input(device, host, x):
    device[1].copy_(host[2], non_blocking=True)


@copy
def to_columns_of_input(device, host, x):
    device[:, 1:9].copy_(host[:, 2:10], non_blocking=True)


@copy
def to_part_of_flat_input(device, host, x):
    device.view(-1)[5:70].copy_(host.view(-1)[2:67], non_blocking=True)


@copy
def to_own_buffer(device, host, x):
    buffer = torch.empty_like(x)
    buffer.copy_(host, non_blocking=True)
    return buffer


@copy
def to_rows_of_own_buffer(device, host, x):
    buffer = torch.zeros_like(x)
    buffer[1:3].copy_(host[2:4], non_blocking=True)
    buffer[5].copy_(host[0], non_blocking=True)
    return buffer


@copy
def list_to_device(device, host, x):
    torch._foreach_copy_([device[0], device[1:3]], [host[3], host[4:6]], non_blocking=True)


# ---- to the host


@copy
def to_host_input(device, host, x):
    host.copy_(x, non_blocking=True)


@copy
def to_row_of_ring(device, host, x):
    host[1].copy_(x[0], non_blocking=True)


@copy
def to_rows_of_host_input(device, host, x):
    host[1:3].copy_(x[2:4], non_blocking=True)
    host[5:7].copy_(x[0:2], non_blocking=True)


@copy
def to_columns_of_host_input(device, host, x):
    host[:, 1:9].copy_(x[:, 2:10], non_blocking=True)


@copy
def to_pinned_buffer(device, host, x):
    buffer = torch.empty(ROWS, COLUMNS, pin_memory=True)
    buffer.copy_(x, non_blocking=True)
    return buffer


@copy
def to_pinned_buffer_like_it(device, host, x):
    buffer = torch.empty_like(x, device="cpu", pin_memory=True)
    buffer.copy_(x, non_blocking=True)
    return buffer


@copy
def to_rows_of_pinned_buffer(device, host, x):
    buffer = torch.zeros(ROWS, COLUMNS, pin_memory=True)
    buffer[1:3].copy_(x[2:4], non_blocking=True)
    buffer[5].copy_(x[0], non_blocking=True)
    return buffer


@copy
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
            current = torch.cuda.current_stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                a = body(device, host, sleep(x) * 2)
            b = body(own_device, own_host, sleep(x) * 3)
            c = x @ x.t()
            current.wait_stream(side)
            return a, b, c

        return fn

    build.__name__ = f"copy_{name}"
    program("a copy between device and host blocks the host", _INPUTS, finish=_and_memory, host_reads=True)(build)


for _name, _body in COPIES.items():
    _register(_name, _body)
