"""Hooks of Dynamo's variables: functions whose closures hold streams, and branches on numbers that the run provides."""

from __future__ import annotations

import types
from typing import Any, TYPE_CHECKING

from torch._dynamo.exc import UserError

from torch_overlay._dynamo.closures import holds_streams, weak_source
from torch_overlay._dynamo.run_time_values import branch_error
from torch_overlay._dynamo.state import handled


if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker


def bind_args(
    original: Callable[..., dict[str, VariableTracker]],
    variable: Any,
    tx: InstructionTranslatorBase,
    args: list[VariableTracker],
    kwargs: dict[str, VariableTracker],
) -> dict[str, VariableTracker]:
    """Wrap the binding of arguments and cells of an inlined function: one that holds streams gets a source."""
    function = variable.fn
    if (
        isinstance(function, types.FunctionType)
        and variable.get_source() is None
        and handled(tx)
        and holds_streams(function)
    ):
        variable.source = weak_source(tx, function)
    return original(variable, tx, args, kwargs)


def evaluate_expr(original: Callable[..., Any], number: Any, output: OutputGraph | None = None) -> Any:
    """Wrap the conversion of a symbolic number to a constant: for one of ours, the error says where it comes from."""
    try:
        return original(number, output)
    except UserError as error:
        if (text := branch_error(number, output)) is None:
            raise
        raise UserError(error.error_type, text) from error
