"""Makes Python numbers and bools of what operators read at run time (ops.py).

In the graph such a number is an unbacked symbol, so it can be returned, computed with, and passed to operators under
fullgraph=True. A branch on it breaks the graph; under fullgraph=True the error says what was asked, and what to do.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, TYPE_CHECKING

from torch_overlay._dynamo.ops import is_capturing, query_event, query_stream, same_stream


if TYPE_CHECKING:
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker

# For the operators on which programs branch: the text of the error.
_QUESTIONS = {
    query_event: "whether an event has happened (`query`)",
    query_stream: "whether a stream is done (`query`)",
    same_stream: "whether a stream that the function makes is another one",
    is_capturing: "whether a CUDA graph is being captured (`is_current_stream_capturing`)",
}


def runtime_scalar(tx: InstructionTranslatorBase, op: Any, *indices: int) -> VariableTracker:
    """Call the operator in the graph; return a number or bool that the run provides."""
    from torch._dynamo import config
    from torch._dynamo.variables.builder import wrap_fx_proxy
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

    shape_env = tx.output.shape_env
    if shape_env is not None and not shape_env.allow_scalar_outputs:
        # For fake tensors only. Whether the user's own Tensor.item() breaks the graph is Dynamo's decision.
        shape_env.settings = dataclasses.replace(shape_env.settings, allow_scalar_outputs=True)
    result = wrap_fx_proxy(tx=tx, proxy=tx.output.create_proxy("call_function", op, indices, {}))
    with config.patch(capture_scalar_outputs=True):
        number = result.call_method(tx, "item", [], {})
    if isinstance(number, SymNodeVariable):
        symbols = dict.fromkeys(number.sym_num.node.expr.free_symbols, _QUESTIONS.get(op, "what the run reads"))
        tx.symbolic_stream_state.run_time_symbols.update(symbols)
    if isinstance(number, SymNodeVariable) and isinstance(result, TensorVariable) and number.python_type() is float:
        number._tensor_var = result  # a float leaves the graph as a tensor, and `result` is one
    return number


def runtime_bool(tx: InstructionTranslatorBase, op: Any, *indices: int) -> VariableTracker:
    """Call the operator as runtime_scalar does, for operators that return 0 or 1; return a bool."""
    from torch._dynamo.variables.base import VariableTracker

    number = runtime_scalar(tx, op, *indices)
    return VariableTracker.build(tx, operator.ne).call_function(tx, [number, VariableTracker.build(tx, 0)], {})


def branch_error(number: Any, output: OutputGraph | None) -> str | None:
    """Return what is wrong with a branch on a symbolic number, if it is one of ours, and what to do."""
    state = getattr(getattr(output, "root_tx", None), "symbolic_stream_state", None)
    known = getattr(state, "run_time_symbols", {})
    asked = [known[s] for s in number.sym_num.node.expr.free_symbols if s in known]
    if not asked:
        return None
    wait = "; or, if it is there to wait for work, call `synchronize()` instead" if "(`query`)" in asked[0] else ""
    return (
        f"A branch on {asked[0]} can't be compiled into one graph: the answer is only known when the code runs. "
        "Leave out fullgraph=True, and the graph breaks here, so that the branch is taken at run time; or return "
        f"the answer and branch outside of the compiled function{wait}."
    )
