# Owner(s): ["module: aotdispatch"]

from types import SimpleNamespace
from unittest import mock

import torch
from torch._functorch.device_peaks import bytes_per_us, flops_per_us
from torch.testing._internal.common_utils import run_tests, TestCase


class TestDevicePeaks(TestCase):
    def setUp(self):
        super().setUp()
        self.forget()
        self.addCleanup(self.forget)
        self.properties = {}
        patch = mock.patch.object(
            torch.cuda, "get_device_properties", lambda index: self.properties[index]
        )
        patch.start()
        self.addCleanup(patch.stop)

    def forget(self):
        bytes_per_us.cache_clear()
        flops_per_us.cache_clear()

    def device(self, index, **properties):
        self.properties[index] = SimpleNamespace(
            multi_processor_count=100, **properties
        )

    def test_memory(self):
        # twice in each clock of 1 MHz, 16 bytes: 32 MB/s, which is 32 bytes a us
        self.device(0, memory_clock_rate=1000, memory_bus_width=128)
        self.device(1, memory_clock_rate=3000, memory_bus_width=128)
        self.assertEqual([bytes_per_us(0), bytes_per_us(1)], [32.0, 96.0])

    def test_memory_that_is_not_described(self):
        self.device(0)
        self.device(1, memory_clock_rate=1000, memory_bus_width=0)
        self.device(2, memory_clock_rate=0, memory_bus_width=128)
        self.assertEqual([bytes_per_us(i) for i in range(3)], [1e6] * 3)

    def test_matrix_units(self):
        self.device(0, clock_rate=2000)  # 2 MHz: 200 clocks of all in each us
        found = [flops_per_us(0, size) / 200 for size in (1, 2, 4, 8)]
        self.assertEqual(found, [2048, 1024, 256, 64])

    def test_clock_that_is_not_described(self):
        self.device(0)
        self.device(1, clock_rate=0)
        self.device(2, clock_rate=1_000_000)
        self.assertEqual(len({flops_per_us(i, 2) for i in range(3)}), 1)


if __name__ == "__main__":
    run_tests()
