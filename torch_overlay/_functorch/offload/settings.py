"""Parses and checks `torch_overlay.config.activation_offload`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


MIN_BYTES = 1 << 20
"""Smaller tensors stay on the device: a copy takes some 8 us before its first byte."""

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


def settings(config: Any) -> Settings | None:
    """Return the settings; None if `config` has offload off. Raise ValueError if the option is not understood, or can't
    be followed."""
    found = parse(config.activation_offload)
    if found is not None and not config.streams:
        raise ValueError(
            "torch_overlay.config.activation_offload needs torch_overlay.config.streams: copies to the host run on "
            "streams of their own. Set streams = True, or activation_offload = None."
        )
    return found


def parse(value: Any) -> Settings | None:
    if value is None or value in ("", "none", "None"):
        return None
    if value == "auto":
        return Settings(None, strict=False)
    if isinstance(value, str):  # from the environment
        try:
            value = {"budget_gb": float(value)}
        except ValueError:
            raise _error(value) from None
    if not isinstance(value, dict) or not {"budget_gb"} <= value.keys() <= {"budget_gb", "strict", "min_bytes"}:
        raise _error(value)
    budget, strict, least = value["budget_gb"], value.get("strict", True), value.get("min_bytes", MIN_BYTES)
    numbers = isinstance(budget, (int, float)) and not isinstance(budget, bool) and budget >= 0
    if not numbers or budget != budget or budget == float("inf") or not isinstance(strict, bool):
        raise _error(value)
    if not isinstance(least, int) or isinstance(least, bool) or least < 0:
        raise _error(value)
    return Settings(int(budget * 1e9), strict, least)


def _error(value: Any) -> ValueError:
    return ValueError(f"torch_overlay.config.activation_offload is {value!r}; {_FORM}")
