"""Free a traced frame's variables, and with them the program's own objects that the variables stand for.

Upstream empties its tables for this. But the variable of an object with a variable for its `__dict__` isn't freed,
because the two refer to one another: a frame that sets an attribute of an argument is enough. That cycle keeps the
object, and the tensors in it, alive until the garbage collector runs.
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
