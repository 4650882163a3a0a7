"""Reports compiled code that asked for a CUDA graph and gets none, and why.

A refusal has a reason code of `causes`, a text, and where they are known the operator and the user's line. Each
different refusal of a region is logged once and kept for `refusals()`; all are counted. The code then runs as compiled.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_overlay._inductor.relaunch.causes import CAUSES


if TYPE_CHECKING:
    from torch_overlay._inductor.relaunch.compiled_code import Code

# Namespaces of operators that communicate with other processes: Note [Collectives], in `policy`.
COMMUNICATION = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "c10d_functional", "symm_mem")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refused:
    code: Code
    reason: str
    message: str
    operator: str = ""
    line: str = ""

    @property
    def remedy(self) -> str:
        return CAUSES[self.reason].remedy

    def __str__(self) -> str:
        where = f" (the region begins at {self.code.source})" if self.code.source else ""
        if self.line:
            where = f" ({self.line})"
        return f"{self.code.name} runs without a CUDA graph [{self.reason}]: {self.message}{where}"


_refused: list[Refused] = []
_MOST_REFUSED = 1000


def refuse(found: Refused) -> None:
    """Log and count one refusal. Raises if the user asked for graphs or an error (`triton.cudagraph_or_error`)."""
    import torch._inductor.config
    from torch._dynamo.utils import counters

    counters["torch_overlay"]["cudagraph_refusals"] += 1
    if found not in _refused:
        log.warning("%s", found)
        if len(_refused) < _MOST_REFUSED:
            _refused.append(found)
    if torch._inductor.config.triton.cudagraph_or_error:
        raise RuntimeError(str(found))


def refused() -> list[Refused]:
    """Return the refusals of this process, each once."""
    return list(_refused)


def refusals() -> list[str]:
    return list(map(str, _refused))
