"""PyTorch's own database of operators as stream programs: each operator in the middle of a side stream.

    program = build(case, side)          # `side` None: the same without streams
    args, kwargs = sample(case, device="cuda")
    on_side, on_current = program(args, kwargs)

A case is an operator of `op_db` or of the databases of foreach operators, a variant, a type, and a mode. The program
waits, computes on the side stream, and lets the current stream wait. What the side stream has made, both streams may
read after the call (`on_side`), the rest only the current one.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree


DEFAULT, GRAPHS, FOLDED = "default", "reduce-overhead", "folded"  # folded: with graphs, and small branches folded
MODES = (DEFAULT, GRAPHS, FOLDED)
COUNT = 3  # tensors in a list


@dataclass(frozen=True)
class Variant:
    """`real` and `complex` are the modes in which it runs with such numbers if none is asked for."""

    about: str
    real: tuple[str, ...] = ()
    complex: tuple[str, ...] = ()
    sample: int = 0
    trains: bool = False


# Few enough that all of them run in eight minutes: what one variant shows of an operator, no other shows again.
VARIANTS = {
    "forward": Variant("of what the caller gives; the result is returned", (GRAPHS,)),
    "made": Variant("of what the side stream has made; only the side stream reads the result", (DEFAULT,), sample=1),
    "misaligned": Variant("forward, of inputs that are aligned in the first calls only", (), (DEFAULT,)),
    "conjugated": Variant("of conjugates, which are views made in the block", (), (GRAPHS,)),
    "in_place": Variant("the operator updates an input", (GRAPHS,), (FOLDED,)),
    "update": Variant("the caller's stream updates what the side stream has made", (DEFAULT,), (GRAPHS,)),
    "out": Variant("into memory that is given", (FOLDED,), (GRAPHS,)),
    "backward": Variant("forward and backward", (GRAPHS,), (GRAPHS,), trains=True),
    "saved": Variant("the caller's stream saves what the side stream has made", (DEFAULT,), (DEFAULT,), trains=True),
}


@dataclass(frozen=True)
class Case:
    operator: str
    variant: str
    dtype: str
    mode: str
    sample: int = 0

    @property
    def row(self) -> str:
        return self.operator

    @property
    def column(self) -> str:
        return f"{self.variant}/{self.dtype}/{self.mode}/{self.sample}"


# ---- which cases there are


@functools.cache
def operators() -> dict[str, Any]:
    from torch.testing._internal import common_methods_invocations as known

    lists = (known.foreach_unary_op_db, known.foreach_binary_op_db, known.foreach_pointwise_op_db)
    found = itertools.chain(known.op_db, *lists, known.foreach_reduce_op_db, known.foreach_other_op_db)
    return {op.name + ("." + op.variant_test_name if op.variant_test_name else ""): op for op in found}


TYPES = ("float32", "int64", "bool", "bfloat16", "float16", "float8_e4m3fn")


def dtypes(op: Any) -> list[str]:
    """The first type that the operator has, and complex numbers."""
    has = {str(t).removeprefix("torch.") for t in op.supported_dtypes("cuda")}
    return [t for t in TYPES if t in has][:1] + ["complex64"] * ("complex64" in has)


def applies(op: Any, variant: str, dtype: str) -> bool:
    is_list, is_complex = op.name.startswith("_foreach_"), getattr(torch, dtype).is_complex
    differentiable = op.supports_autograd and getattr(torch, dtype) in op.supported_backward_dtypes("cuda")
    if VARIANTS[variant].trains:
        return differentiable
    if variant == "made":
        return not differentiable  # else `saved` says more
    if variant in ("in_place", "update"):
        return op.inplace_variant is not None
    if variant == "out":
        return op.supports_out and not is_list
    return is_complex or variant != "conjugated"


def cases(variants: Sequence[str] = tuple(VARIANTS), modes: Sequence[str] = ()) -> Iterator[Case]:
    """All cases of the variants, in the modes that are named or in each variant's own."""
    for name, op in operators().items():
        for dtype in dtypes(op):
            for variant in variants:
                kind = VARIANTS[variant]
                if applies(op, variant, dtype):
                    for mode in modes or (kind.complex if getattr(torch, dtype).is_complex else kind.real):
                        yield Case(name, variant, dtype, mode, kind.sample)


# ---- what a program is given


class NoSample(Exception):
    """The operator has no such sample."""


def sample(case: Case, device: str, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the case's program. Of each seed the same, with other numbers."""
    op, trains = operators()[case.operator], VARIANTS[case.variant].trains
    torch.manual_seed(seed)
    drawn = op.sample_inputs(device, getattr(torch, case.dtype), requires_grad=trains)
    found = (s for s in drawn if _has_elements(s))
    taken = list(itertools.islice(found, case.sample + 1))
    if not taken:
        raise NoSample("no sample with elements")
    chosen = taken[-1]
    args, kwargs = (chosen.input, *chosen.args), chosen.kwargs
    if op.name.startswith("_foreach_"):
        args, kwargs = pytree.tree_map(_shortened, (args, kwargs), is_leaf=_is_list)
    if case.variant == "out":
        with torch.no_grad():
            result = op.op(*args, **kwargs)
        kwargs = {**kwargs, "out": pytree.tree_map(torch.empty_like, result if _is_tensor(result) else tuple(result))}
    return args, kwargs


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _shortened(value: Any) -> Any:
    return value[:COUNT] if _is_list(value) else value


def _has_elements(drawn: Any) -> bool:
    found = [t for t in pytree.tree_leaves((drawn.input, drawn.args, drawn.kwargs)) if _is_tensor(t)]
    return not found or any(t.numel() for t in found)


# ---- the program

ARITHMETIC = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
ARITHMETIC |= {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def results(value: Any) -> list[torch.Tensor]:
    """The tensors of an operator's result, which may be a number or a list."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in results(v)] if isinstance(value, (tuple, list)) else []


def doubled(value: Any) -> list[torch.Tensor]:
    """What one kernel makes of each tensor of a result."""
    return [t.logical_not() if t.dtype is torch.bool else t * 2 for t in results(value) if _has_arithmetic(t)]


def _has_arithmetic(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and (tensor.dtype is torch.bool or tensor.dtype in ARITHMETIC)


def made(value: Any) -> Any:
    """The same, in memory of the current stream: numbers that no pass may take for the input itself."""
    if isinstance(value, list) and value and all(_has_fractions(v) for v in value):
        return torch._foreach_div(torch._foreach_mul(value, 4), 4)  # made as a list
    if isinstance(value, (tuple, list)):
        return type(value)([made(v) for v in value])
    if isinstance(value, torch.Tensor) and _has_arithmetic(value):
        if value.dtype is torch.bool:
            return value.logical_not().logical_not()
        return (value * 4) / 4 if _has_fractions(value) else (value + 1) - 1
    return value


def _has_fractions(value: Any) -> bool:
    """Does a division keep its type?"""
    return (
        isinstance(value, torch.Tensor) and _has_arithmetic(value) and (value.is_floating_point() or value.is_complex())
    )


def conjugated(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)([conjugated(v) for v in value])
    return value.conj() if isinstance(value, torch.Tensor) and value.is_complex() else value


def build(case: Case, side: torch.cuda.Stream | None) -> Callable[..., Any]:
    op = operators()[case.operator]
    call, variant = op.op, case.variant
    update = op.inplace_variant

    def block(args: Any, kwargs: Any) -> Any:
        if variant == "made":
            return doubled(call(*made(args), **kwargs))
        if variant == "conjugated":
            result = call(*conjugated(args), **kwargs)
        elif variant == "in_place":
            result = update(*args, **kwargs)
            result = args[0] if result is None else result
        elif variant in ("update", "saved"):
            return made(args)
        else:
            result = call(*args, **kwargs)
        return [*results(result), *doubled(result)]

    def after(inside: Any, kwargs: Any) -> tuple[Any, Any]:
        if variant == "update":
            update(*inside, **kwargs)
            return [], inside  # all of it: what eager frees there, it doesn't promise to anyone
        if variant == "saved":
            result = call(*inside, **kwargs)
            return [], [*results(result), *doubled(result)]
        return inside, doubled(inside)

    if side is None:
        return lambda args, kwargs: after(block(args, kwargs), kwargs)

    def program(args: Any, kwargs: Any) -> tuple[Any, Any]:
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            inside = block(args, kwargs)
        current.wait_stream(side)
        return after(inside, kwargs)

    return program
