# Owner(s): ["module: cuda"]

import subprocess
import sys
from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch import address_space
from torch.cuda import memory
from torch.testing._internal.common_utils import run_tests, TestCase


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
        self.enterContext(
            mock.patch.object(
                torch._C, "_cuda_memoryStats", lambda _: self.stats, create=True
            )
        )

    def test_pools_that_hold_nothing(self):
        self.stats[NAME] = pools()
        found = torch.cuda.memory_stats_as_nested_dict()
        self.assertEqual(sorted(found[NAME]), [OTHERS, ALIVE])
        self.assertEqual(found["allocated_bytes"], {"all": {"current": 3}})

    def test_no_pools(self):
        found = torch.cuda.memory_stats_as_nested_dict()
        self.assertEqual(found, {"allocated_bytes": {"all": {"current": 3}}})

    def test_who_asks_without_graphs_loads_nothing(self):
        program = (
            "import sys, torch\n"
            "memory = torch.cuda.memory\n"
            "memory.is_initialized = lambda: True\n"
            "memory._get_device_index = lambda device, optional: 0\n"
            "torch._C._cuda_memoryStats = lambda device: {'pools': 1}\n"
            "assert memory.memory_stats_as_nested_dict() == {'pools': 1}\n"
            "assert 'torch._inductor.cudagraph_relaunch' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True)


if __name__ == "__main__":
    run_tests()
