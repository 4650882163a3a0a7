"""Has Inductor prepare for captures while it waits for its workers."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

import torch._inductor.config as inductor_config

from torch_overlay import config
from torch_overlay._inductor.relaunch.prepare import prepare_early


if TYPE_CHECKING:
    from collections.abc import Callable


def wait(original: Callable[[Any, dict[str, Any]], None], compiler: Any, scope: dict[str, Any]) -> None:
    """Seam of AsyncCompile.wait: prepare for captures while the workers compile."""
    if inductor_config.triton.cudagraphs and config.cudagraphs == "relaunch":
        prepare_early()
    original(compiler, scope)
