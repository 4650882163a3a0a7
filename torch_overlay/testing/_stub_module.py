"""Replaces a generated wrapper by a module that returns tensors of the right layout, and executes nothing.

Inductor's code generation runs in full and its text is kept. The caller then gets a callable with the calling
convention of a generated module (a boxed argument list, `recursively_apply_fns` for CUDA graph partitions), whose
outputs are fake tensors with the sizes, strides, dtype and device that the graph promised. Symbolic sizes are evaluated
with the arguments of that call. So the code after a graph break, the backward and a second compiled function can run.

`executed_by` sets a function that executes the text instead.
"""

from __future__ import annotations

import contextlib
import re
import types
from typing import Any, TYPE_CHECKING

import sympy
import torch
from torch._inductor.virtualized import V


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


_UNKNOWN_SIZE, _UNKNOWN_NUMBER = 8, 1.0  # for unbacked symbols, which depend on the data


_OPERATOR = re.compile(r"\b(extern_kernels|torch\.ops)\.[\w.]+\(")  # a call of a library, or of an operator

_execute: list[Callable[[str, Any], Any]] = []


@contextlib.contextmanager
def executed_by(execute: Callable[[str, Any], Any]) -> Iterator[None]:
    """Replace each module that is generated inside by the result of `execute(text, stub)`."""
    _execute.append(execute)
    try:
        yield
    finally:
        _execute.remove(execute)


def _maker(output: Any) -> Callable[[Callable[[Any], Any]], Any]:
    """Return the function that makes an output of the graph, given a function that evaluates symbolic numbers."""
    from torch._inductor import ir

    if isinstance(output, ir.NoneAsConstantBuffer):
        return lambda value: None
    if isinstance(output, ir.ShapeAsConstantBuffer):
        output = output.expr
    if isinstance(output, sympy.Basic | int | float):
        return lambda value: value(output)
    sizes, strides = tuple(output.get_size()), tuple(output.get_stride())
    kind = {"dtype": output.get_dtype(), "device": output.get_device()}
    return lambda value: torch.empty_strided([*map(value, sizes)], [*map(value, strides)], **kind)


def _bind(names: Sequence[Any], args: Sequence[Any], given: dict[Any, Any]) -> None:
    """Read the values of symbols from one call's arguments: a symbol is an argument, or a tensor's size or stride."""
    for expected, arg in zip(names, args):
        if isinstance(expected, sympy.Symbol) and isinstance(arg, int | torch.SymInt):
            given[expected] = int(arg)
        elif isinstance(arg, torch.Tensor) and hasattr(expected, "get_size"):
            for expr, size in zip((*expected.get_size(), *expected.get_stride()), (*arg.size(), *arg.stride())):
                if isinstance(expr, sympy.Symbol):
                    given.setdefault(expr, int(size))


def stub_module(graph: Any) -> Any:
    """Generate a graph's code and return a stub: in the simulation, this replaces `GraphLowering.compile_to_module`."""
    code, _ = graph.codegen_with_cpp_wrapper() if graph.cpp_wrapper else graph.codegen()
    if type(graph).save_output_code is not None:
        type(graph).save_output_code(code.value)
    inputs = list(graph.graph_inputs.values())
    outputs = [_maker(o) for o in graph.graph_outputs]
    hints: dict[Any, Any] = dict(V.graph.sizevars.backed_var_to_val)

    partitions: list[Callable[[Any], Any]] = []

    def call(args: list[Any]) -> tuple[Any, ...]:
        given = dict(hints)
        _bind(inputs, args, given)
        for partition in partitions:
            partition(list(args))  # computes nothing; the runner around it counts the call
        args.clear()

        def value(expr: Any) -> Any:
            result = sympy.sympify(expr).subs(given)
            result = result.subs({s: _UNKNOWN_SIZE if s.is_integer else _UNKNOWN_NUMBER for s in result.free_symbols})
            return bool(result) if result.is_Boolean else int(result) if result.is_Integer else float(result)

        return tuple(make(value) for make in outputs)

    def recursively_apply_fns(wrap: Sequence[Callable[[Any], Any]]) -> None:
        partitions[:] = [fn(partition) for fn in wrap]

    def partition(args: list[Any]) -> None: ...

    call.calls_operators = partition.calls_operators = bool(_OPERATOR.search(code.value))  # type: ignore[attr-defined]
    runner = types.SimpleNamespace(partitions=[], recursively_apply_fns=recursively_apply_fns)
    stub = types.SimpleNamespace(
        call=call, __file__=__file__, recursively_apply_fns=recursively_apply_fns, runner=runner
    )
    return _execute[-1](code.value, stub) if _execute and not graph.aot_mode else stub
