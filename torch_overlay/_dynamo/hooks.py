"""Hooks on Dynamo, in the order in which a frame meets them; `external_objects` has those on the objects of its calls.

- A frame is compiled: Dynamo's graph is of a subclass whose methods are ours, and the backend is handed the frame's
  facts.
- Dynamo traces functions, classes, streams and numbers: each hook asks a module of this folder first.
- Upstream's checks and helpers that the planner makes unnecessary are skipped. Upstream raises an error for an event
  recorded after a mutation of an input, because the write-back of the mutation comes after the graph; and for `del x`
  of a tensor that two streams used, it records an event and waits for the event at once. The planner orders write-backs
  and frees by the same rule as all other operations.
"""

from __future__ import annotations

import types
from typing import Any, TYPE_CHECKING

import torch
import torch._inductor.config as inductor_config
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.exc import UserError
from torch._dynamo.source import GlobalWeakRefSource

from torch_overlay import frame_facts
from torch_overlay._dynamo import construct, functions, graph_breaks, objects, ranges, registry
from torch_overlay._dynamo.contexts import bind, unbound_method
from torch_overlay._dynamo.methods import branch_error
from torch_overlay._dynamo.state import handled
from torch_overlay.hooks import override


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.source import CurrentStreamSource
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.base import VariableTracker


# -- a frame

_COMPILER = 5  # the compiler's position among the arguments of `_compile`
_WRAPPERS = "cpp_wrapper", "fx_wrapper"


def compile_frame(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compile a frame, with the wrapper that the options of torch.compile ask for: `handles_streams` looks there."""
    options = getattr(innermost_backend(args[_COMPILER]), "config", None)
    wrapper = {name: options[name] for name in _WRAPPERS if name in options} if isinstance(options, dict) else {}
    with registry.inner_frame(), inductor_config.patch(wrapper):
        return original(*args, **kwargs)


def call_user_compiler(original: Callable[..., Any], output: OutputGraph, *args: Any) -> Any:
    """Hand the frame's facts to the layers that compile its graph."""
    with frame_facts.compiling(registry.facts()):
        return original(output, *args)


def output_graph_init(original: Callable[..., None], output: OutputGraph, *args: Any, **kwargs: Any) -> None:
    override(
        output,
        _get_stack_values_to_restore=graph_breaks.stack_values_to_restore,
        compile_subgraph=graph_breaks.compile_subgraph,
        cleanup_graph=ranges.cleanup_graph,
        check_input_mutation_on_current_stream=check_input_mutation_on_current_stream,
        call_user_compiler=call_user_compiler,
    )
    original(output, *args, **kwargs)


# -- variables

# Note [Cells that hold streams]
# The methods of an object that a frame makes have no source: Dynamo takes the contents of their cells and defaults for
# constants, and can't make a constant of a stream. With a source, a weak reference in the globals of the compiled code,
# it looks up and guards their cells as those of a function of the caller.
_STREAM_TYPES = (torch.Stream, torch.Event, torch.cuda.StreamContext)
_MOST_OBJECTS = 1000  # searched per function


def _inside(value: object) -> Iterable[object]:
    """Return the objects that a value holds, as far as they are searched for streams."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, types.FunctionType):
        return _held(value)
    if isinstance(value, (type, types.ModuleType, torch.Tensor)):
        return ()
    attributes = getattr(value, "__dict__", None)
    return attributes.values() if isinstance(attributes, dict) else ()


def _held(function: types.FunctionType) -> list[object]:
    held: list[object] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # the cell has not been assigned
            continue
    return held


def holds_streams(function: types.FunctionType) -> bool:
    """True if a cell or a default of the function holds a stream or event, or an object that holds one."""
    todo, seen = _held(function), set()
    while todo and len(seen) < _MOST_OBJECTS:
        value = todo.pop()
        if isinstance(value, _STREAM_TYPES):
            return True
        if id(value) not in seen:
            seen.add(id(value))
            todo.extend(_inside(value))
    return False


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
        tx.output.bypass_package("the compiled code has a reference to a function that the frame reaches on its own")
        variable.source = GlobalWeakRefSource(tx.store_global_weakref_by_id("__stream_function", function))
    return original(variable, tx, args, kwargs)


def call_function(
    original: Callable[..., VariableTracker],
    variable: Any,
    tx: InstructionTranslatorBase,
    args: Sequence[VariableTracker],
    kwargs: dict[str, VariableTracker],
) -> VariableTracker:
    """Wrap the call of a class: streams, events and contexts, and what binds and makes contexts."""
    cls = variable.value
    found = construct.make(tx, cls, args, kwargs) or bind(tx, cls, args) or ranges.decorated(tx, cls, args)
    return found or original(variable, tx, args, kwargs)


def resolve_cls_descriptor(
    original: Callable[..., VariableTracker],
    variable: Any,
    tx: InstructionTranslatorBase,
    name: str,
    descriptor: object,
    source: Any,
) -> VariableTracker:
    """Wrap the look-up of a class attribute that is a descriptor: `__enter__` and `__exit__` of contexts."""
    found = unbound_method(tx, variable.value, name, descriptor)
    return found or original(variable, tx, name, descriptor, source)


_merged: tuple[dict[Any, Any], dict[Any, Any]] | None = None


def get_handlers(original: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
    """Wrap the cached function that builds Dynamo's table of special functions: add ours to the table."""
    global _merged
    table = original()
    if _merged is None or _merged[0] is not table:
        ours = {**functions.handlers(), **ranges.HANDLERS}
        _merged = (table, {**table, **{fn: functions.choose(ours[fn], table.get(fn)) for fn in ours}})
    return _merged[1]


def evaluate_expr(original: Callable[..., Any], number: Any, output: OutputGraph | None = None) -> Any:
    """Wrap the conversion of a symbolic number to a constant: for one of ours, the error says where it comes from."""
    try:
        return original(number, output)
    except UserError as error:
        if (text := branch_error(number, output)) is None:
            raise
        raise UserError(error.error_type, text) from error


# -- the caller's stream


def reconstruct_current_stream(
    original: Callable[[CurrentStreamSource, PyCodegen], None], source: CurrentStreamSource, codegen: PyCodegen
) -> None:
    """Emit what pushes the current stream of a device; of a CUDA device as a torch.cuda.Stream."""
    if source.device.type != "cuda" or not torch.cuda.is_available():
        original(source, codegen)
        return
    codegen.add_push_null(lambda: codegen.load_import_from(objects.__name__, "callers_stream"))
    codegen.append_output(codegen.create_load_const(-1 if source.device.index is None else source.device.index))
    codegen.call_function(1, False)


# -- skipped


def check_input_mutation_on_current_stream(
    original: Callable[..., None], output: OutputGraph, tx: InstructionTranslatorBase
) -> None:
    if not handled(tx):
        original(output, tx)


def maybe_emit_sync_dealloc(original: Callable[..., None], tx: InstructionTranslatorBase, variable: Any) -> None:
    if not handled(tx):
        original(tx, variable)
