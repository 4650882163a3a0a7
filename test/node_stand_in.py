"""A driver in C that notes which nodes of executable graphs are set, and kernel nodes for it.

    module, library = driver_stand_in.build_module(DRIVER, folder)

The tests of the pull requests that set nodes in C share it.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any


# It notes the kind of each node that is set, its handles, parameters, and context.
DRIVER = """
#include <stdint.h>

static uint64_t noted[64][5], context = 0xc0;
static int count, failing;

void reset(int fail_at) { count = 0; failing = fail_at; context = 0xc0; }
void forget_context(void) { context = 0; }
uint64_t *notes(int *found) { *found = count; return noted[0]; }
static int note(int kind, uint64_t exec, uint64_t node, void *params, uint64_t on) {
  if (failing && !--failing) return 1;
  uint64_t row[5] = {kind, exec, node, (uint64_t)(uintptr_t)params, on};
  for (int i = 0; i < 5; i++) noted[count][i] = row[i];
  count++;
  return 0;
}
int cuGetErrorString(int code, const char **text) { *text = "refused"; return 0; }
int cuCtxGetCurrent(uint64_t *out) { *out = context; return 0; }
int cuCtxSetCurrent(uint64_t now) { context = now; return 0; }
int cuGraphExecKernelNodeSetParams_v2(uint64_t exec, uint64_t node, void *params) {
  return note(0, exec, node, params, context);
}
int cuGraphExecMemsetNodeSetParams(uint64_t exec, uint64_t node, void *params,
                                   uint64_t on) {
  return note(1, exec, node, params, on);
}
int cuGraphExecMemcpyNodeSetParams(uint64_t exec, uint64_t node, void *params,
                                   uint64_t on) {
  return note(2, exec, node, params, on);
}
"""
VALUES = 128  # where the arguments of a kernel begin in its block
SHAPE = (7, 1, 2, 3, 4, 5, 6, 48)  # function, grid, block, shared memory


def noted(library: ctypes.CDLL) -> list[tuple[int, ...]]:
    """Return the rows that were noted since the last call."""
    library.notes.restype = ctypes.POINTER(ctypes.c_uint64)
    count = ctypes.c_int()
    rows = library.notes(ctypes.byref(count))
    found = [tuple(rows[5 * i : 5 * i + 5]) for i in range(count.value)]
    library.reset(0)
    return found


def kernel(handle: int, *values: int) -> tuple[Any, ...]:
    """Return a kernel node with these arguments, of 8 bytes each, as data."""
    head = struct.pack("<Q7I4x4Q", *SHAPE, 0, 0, 0x77, 0x88).ljust(VALUES, b"\0")
    block = head + struct.pack(f"<{len(values)}Q", *values)
    places = tuple(VALUES + 8 * i for i in range(len(values)))
    return 0, handle, 0, f"node {handle}", block, places
