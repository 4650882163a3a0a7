"""Hook that gives a function without a source one, if its closure cells or default arguments hold streams."""

from __future__ import annotations

import types
from typing import Any, TYPE_CHECKING

from torch_overlay._dynamo.closures import holds_streams, weak_source
from torch_overlay._dynamo.state import handled


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker


def bind_args(
    original: Callable[..., dict[str, VariableTracker]],
    variable: Any,
    tx: InstructionTranslatorBase,
    args: list[VariableTracker],
    kwargs: dict[str, VariableTracker],
) -> dict[str, VariableTracker]:
    """Wrap the binding of arguments and cells of an inlined function."""
    function = variable.fn
    if (
        isinstance(function, types.FunctionType)
        and variable.get_source() is None
        and handled(tx)
        and holds_streams(function)
    ):
        variable.source = weak_source(tx, function)
    return original(variable, tx, args, kwargs)
