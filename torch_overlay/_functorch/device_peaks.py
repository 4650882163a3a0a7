"""Estimates a device's peak rates from its properties, where nothing has been measured."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def bytes_per_us(device_index: int) -> float:
    """Return the memory bandwidth of the device, by its clock and bus width."""
    properties: Any = torch.cuda.get_device_properties(device_index)
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    if clock and width:
        return 2 * clock * 1e3 * width / 8 / 1e6
    return 1e6  # 1 TB/s: in doubt a branch seems longer than it is, and isn't folded


@functools.cache
def flops_per_us(device_index: int, element_size: int) -> float:
    """Return the peak rate of the device's matrix units, at the operations per clock of the oldest supported ones."""
    properties: Any = torch.cuda.get_device_properties(device_index)
    clock = getattr(properties, "clock_rate", 0) or 1e6  # kHz
    per_clock = {1: 2048, 2: 1024, 4: 256}.get(element_size, 64)
    return properties.multi_processor_count * per_clock * clock / 1e3
