"""Parses and checks the option that says how much saved activations may hold on the device."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


MIN_BYTES = 1 << 20
"""Smaller tensors stay on the device: a copy takes some 8 us before its first byte."""

MAX_GB = sys.float_info.max / 1e9

_FORM = (
    'it must be None, "auto", or a dict with "budget_gb" (a number of gigabytes of 10^9 bytes, not negative), and '
    'maybe "strict" (a bool: is it an error if the budget can\'t be met?) and "min_bytes" (an int: smaller tensors '
    "stay on the device)"
)


@dataclass(frozen=True)
class Settings:
    """The parsed option. `budget` is in bytes; None for as much as the device has free."""

    budget: int | None
    strict: bool = True
    min_bytes: int = MIN_BYTES


def parse(value: Any, option: str) -> Settings | None:
    """Return the settings; None if offloading is off. Raise ValueError, with the option's name, if the value is not
    understood."""
    if value is None or value in ("", "none", "None"):
        return None
    if value == "auto":
        return Settings(None, strict=False)
    if isinstance(value, str):  # from the environment
        try:
            value = {"budget_gb": float(value)}
        except ValueError:
            raise _error(value, option) from None
    if not isinstance(value, dict) or not {"budget_gb"} <= value.keys() <= {"budget_gb", "strict", "min_bytes"}:
        raise _error(value, option)
    budget, strict, least = value["budget_gb"], value.get("strict", True), value.get("min_bytes", MIN_BYTES)
    is_number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if not is_number or not 0 <= budget <= MAX_GB or not isinstance(strict, bool):  # NaN compares as False
        raise _error(value, option)
    if not isinstance(least, int) or isinstance(least, bool) or least < 0:
        raise _error(value, option)
    return Settings(round(budget * 1e9), strict, least)


def _error(value: Any, option: str) -> ValueError:
    return ValueError(f"{option} is {value!r}; {_FORM}")
