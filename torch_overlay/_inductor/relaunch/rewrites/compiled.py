"""Has rewritten graphs compiled, and has their code called with the inputs that they were rewritten to take."""

from __future__ import annotations

import contextlib
from typing import Any, TYPE_CHECKING

from torch_overlay import config
from torch_overlay._inductor.relaunch.rewrites.graph import compiling, rewrite, Rewrites
from torch_overlay._inductor.relaunch.rewrites.resident import Residents


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.fx import GraphModule


def is_wanted(switch: Any) -> bool:
    """True if a graph is to be rewritten, where graphs are relaunched. `switch`: Inductor's, which is on if the code is
    to have CUDA graphs; None where there is none yet. Code that can't be split is not rewritten."""
    import torch._inductor.config as inductor_config
    from torch._inductor.virtualized import V

    asked = inductor_config.triton.cudagraphs if switch is None else switch
    return bool(asked and config.cudagraph_rewrites and inductor_config.graph_partition and not V.aot_compilation)


@contextlib.contextmanager
def rewritten(gm: GraphModule, example_inputs: Sequence[Any], is_backward: bool) -> Iterator[list[Any]]:
    """Rewrite a graph, which is compiled inside. Yields the example inputs of the new graph."""
    from torch._inductor.utils import get_donated_idxs

    donated = get_donated_idxs() if is_backward else None  # the code may use their memory for something else
    found, inputs = rewrite(gm, example_inputs, donated or ())
    with compiling(found):
        yield inputs


@contextlib.contextmanager
def residing(compiled: Any) -> Iterator[tuple[tuple[tuple[str, str], ...], Residents]]:
    """Have code that is finished inside, just compiled or from a cache, called with copies of its inputs on the device.
    Yields what was rewritten, and the copies."""
    found = Rewrites.read(getattr(compiled, "relaunch_rewrites", ()))
    residents = Residents(found.resident)
    yield found.made, residents
    if residents.rows:
        compiled.current_callable = residents.around(compiled.current_callable)
