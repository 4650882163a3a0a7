"""Has torch's statistics of memory leave out the pools of captures."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable


def memory_stats(original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Seam of torch.cuda.memory.memory_stats_as_nested_dict."""
    from torch_overlay._inductor.relaunch.pool_stats import drop_empty

    stats = original(*args, **kwargs)
    drop_empty(stats)
    return stats
