"""When a frame is traced, its variables go, and with them the program's own objects that they stand for.

Upstream empties its tables for this. A variable of an object whose `__dict__` was looked at stays all the same: it has
a variable of that dictionary, which refers to it. What a frame resumes with behind a graph break are real objects, so
that circle keeps the tensors in them until the garbage collector comes by.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable


def cleanup(original: Callable[..., None], output: Any) -> None:
    variables = [*output.side_effects.id_to_variable.values(), *output.variable_tracker_cache.values()]
    original(output)
    for variable in variables:
        if getattr(variable, "dict_vt", None) is not None:
            variable.dict_vt = None  # it would be made anew
