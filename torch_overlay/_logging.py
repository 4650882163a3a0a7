"""Registers the log name "torch_overlay", for TORCH_LOGS="torch_overlay" and torch._logging.set_logs(modules={...}).

In the patched form this runs at the end of upstream's own list of log names, before torch reads TORCH_LOGS. In the
overlay form torch has read TORCH_LOGS already, and since a name there may be that of any importable module, it has
already set our levels if TORCH_LOGS names us. It remains to register the name and to give the logger the handler that
all of torch's loggers have. The levels and handlers of other loggers are not touched.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


NAME = "torch_overlay"


def register(registrations: ModuleType) -> Callable[[], None]:
    """Register the log name with torch._logging."""
    from torch._logging import _internal

    if _internal.log_registry.is_log(NAME):
        return lambda: None
    package = __name__.rpartition(".")[0]
    registrations.register_log(NAME, package)
    logger = logging.getLogger(package)
    propagate, level = logger.propagate, logger.level
    _internal._setup_handlers(_internal._StderrHandler, logger)
    logger.propagate = False

    def undo() -> None:
        _internal.log_registry.log_alias_to_log_qnames.pop(NAME, None)
        _internal._clear_handlers(logger)
        logger.propagate, logger.level = propagate, level
        logger.manager._clear_cache()  # type: ignore[attr-defined]

    return undo
