"""Statistics of memory leave out pools of graphs that hold nothing."""

from unittest import mock

import torch
from torch.cuda import memory
from torch.testing._internal.common_utils import TestCase

import form  # noqa: F401
from torch_overlay._inductor.relaunch.capture import address_space


OURS, OTHERS, ALIVE = (0, 7), (0, 8), (0, 9)
NAME = "reserved_bytes_by_private_pools"


def pools():
    """Statistics of pools as the allocator has them, by id."""
    found = {pool: {"all": {"current": 0, "peak": 64}} for pool in (OURS, OTHERS)}
    return found | {ALIVE: {"all": {"current": 64, "peak": 64}}}


class TestPoolStats(TestCase):
    def setUp(self):
        super().setUp()
        self.stats = {"allocated_bytes": {"all": {"current": 3}}}
        for owner, name, value in (
            (memory, "is_initialized", lambda: True),
            (memory, "_get_device_index", lambda device, optional: 0),
            (address_space, "pools_made", {OURS, ALIVE}),
        ):
            self.enterContext(mock.patch.object(owner, name, value))
        self.enterContext(mock.patch.object(torch._C, "_cuda_memoryStats", lambda _: self.stats, create=True))

    def test_pools_that_hold_nothing(self):
        self.stats[NAME] = pools()
        found = torch.cuda.memory_stats_as_nested_dict()
        self.assertEqual(sorted(found[NAME]), [OTHERS, ALIVE])
        self.assertEqual(found["allocated_bytes"], {"all": {"current": 3}})

    def test_no_pools(self):
        found = torch.cuda.memory_stats_as_nested_dict()
        self.assertEqual(found, {"allocated_bytes": {"all": {"current": 3}}})
