"""Has Inductor place the copies of saved activations (seam)."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._functorch.offload.hooks import holds_memory_at_once
from torch_overlay._inductor.offload.schedule import place_copies
from torch_overlay._stream_handling import offloads


if TYPE_CHECKING:
    from collections.abc import Callable


def compute_last_usage(original: Callable[[Any], None], scheduler: Any) -> None:
    if offloads():
        place_copies(scheduler, holds_memory_at_once())
    original(scheduler)
