"""When a frame is traced, its variables go, and with them the program's own objects that they stand for.

Upstream empties its tables for this. The variable of an object with a variable of its `__dict__` stays all the same,
for the two refer to one another: a frame that sets an attribute of an argument is enough. That circle keeps the object,
and the tensors in it, until the garbage collector comes by.
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
