"""Describes the simulated GPU: one NVIDIA H200, as its driver and Triton's driver do."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


@dataclasses.dataclass(frozen=True)
class Properties:
    """The result of `torch.cuda.get_device_properties`, as read on an H200 with driver 580."""

    name: str = "NVIDIA H200"
    major: int = 9
    minor: int = 0
    total_memory: int = 143155 << 20
    multi_processor_count: int = 132
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    L2_cache_size: int = 60 << 20
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    clock_rate: int = 1980000
    memory_clock_rate: int = 3201000
    memory_bus_width: int = 6144
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""


H200 = Properties()


class TritonDriver:
    """A driver with what Inductor and Triton ask for while they generate code. Nothing can be launched with it."""

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {
                "max_shared_mem": H200.shared_memory_per_block_optin,
                "max_num_regs": H200.regs_per_multiprocessor,
                "multiprocessor_count": H200.multi_processor_count,
                "warpSize": H200.warp_size,
                "sm_clock_rate": H200.clock_rate,
                "mem_clock_rate": H200.memory_clock_rate,
                "mem_bus_width": H200.memory_bus_width,
            }

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * H200.major + H200.minor, H200.warp_size)

    def get_current_device(self) -> int:
        return torch.cuda.current_device()

    def set_current_device(self, device: int) -> None:
        torch.cuda.set_device(device)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def get_current_stream(self, device: int) -> int:
        return torch._C._cuda_getCurrentRawStream(device)

    def get_device_interface(self) -> Any:
        return torch.cuda


class Generator:
    """A default CUDA random generator: a seed and an offset, and the 16 bytes in which PyTorch stores the two."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._seed = 0
        self._offset = 0

    def manual_seed(self, seed: int) -> Generator:
        self._seed, self._offset = seed % (1 << 64), 0
        return self

    def seed(self) -> int:
        return self.manual_seed(torch.seed()).initial_seed()

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> None:
        self._offset = offset

    def get_state(self) -> torch.Tensor:
        words = self._seed.to_bytes(8, "little") + self._offset.to_bytes(8, "little")
        with _disable_current_modes():  # a fake tensor would forget the bytes
            return torch.tensor(list(words), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        with _disable_current_modes():
            data = bytes(state.tolist())
        self._seed, self._offset = (int.from_bytes(data[:8], "little"), int.from_bytes(data[8:16], "little"))
