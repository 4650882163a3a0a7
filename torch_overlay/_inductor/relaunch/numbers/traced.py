"""Numbers that note how generated code computes with them: `Traced`.

A traced number is no int and no float. Where code needs the plain value, to decide, to index, to call a library, it
asks for it by one of Python's special methods, and `NumberEscaped` is raised: what happens then is no expression of the
number. So nothing uses a traced number unnoticed.

Where `decisions` are noted, an integer may be compared: the outcome becomes an expression that is unfit for
numbers with another outcome.

A `followed` number is a traced one that is an int or float as well. Where code needs the plain value, it gets it, and
only a second run with other numbers shows that it did.

Generated code launches a kernel by `kernel.run(*arguments, stream=...)`, where the kernel is a global of its module.
While a capture traces numbers, these globals are replaced (`noted`). A launch with traced numbers launches the kernel
with the plain values. Then it runs the kernel's launcher, whose Python code computes the grid, once more with the
traced numbers and with a function in place of the one that launches: it gets what the kernel gets.

Proves which words of a graph are computed from numbers, and computes them for a launch.

Each capture of a region traces its numbers, with other values in the second one. The same parameters must be
the same expressions in both, and each must have the value of its expression (`slots_of`). Then the second graph gets
the values of the first there (`with_numbers_of`), so that the proof of the pointers finds them equal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from typing import Any, NoReturn, TYPE_CHECKING

from torch_overlay._inductor.relaunch.numbers.expressions import (
    constant,
    evaluate,
    Expression,
    inputs_of,
    LARGEST,
    OPERATIONS,
    pack,
    TYPES,
    Unfit,
)
from torch_overlay._inductor.relaunch.proof.functions import static_binary_of
from torch_overlay._inductor.relaunch.proof.nodes import CapturedGraph, KernelNode, NumberSlot
from torch_overlay.thread_value import ThreadValue


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


NUMBERS = (int, float)


class NumberEscaped(Exception):
    """The inputs at these positions are used for more than what a launch can compute and patch."""

    def __init__(self, positions: frozenset[int], how: str) -> None:
        super().__init__(how)
        self.positions = positions


# Where the outcomes are noted of comparisons of traced integers; None: the thread's code may not compare them.
decisions: ThreadValue[dict[Expression, None] | None] = ThreadValue(None)


class Traced:
    """A number of a region, with the expression that it is of the region's inputs."""

    def __init__(self, value: Any, expression: Expression, size: int = 0) -> None:
        self.value, self.expression, self.size = value, expression, size
        if size > LARGEST:
            self.escape(f"it is computed in more than {LARGEST} steps")

    @staticmethod
    def input(position: int, value: Any) -> Traced:
        return Traced(value, ("input", position, type(value)))

    def escape(self, how: str) -> NoReturn:
        raise NumberEscaped(inputs_of([self.expression]), how)

    def __repr__(self) -> str:
        return f"Traced({self.value!r}, {self.expression})"

    def __pos__(self) -> Traced:
        return self

    def __floor__(self) -> Traced:
        return self if type(self.value) is int else _operation("floor", self)

    def __ceil__(self) -> Traced:
        return self if type(self.value) is int else _operation("ceil", self)

    def __trunc__(self) -> Traced:
        return self if type(self.value) is int else self.escape("it is rounded to zero")

    def __pow__(self, exponent: Any) -> Traced:
        if type(self.value) is not int or type(exponent) is not int or not 1 <= exponent <= 8:
            self.escape("it is raised to a power")
        made = self
        for _ in range(exponent - 1):
            made = made * self
        return made

    if TYPE_CHECKING:

        def __mul__(self, other: Any) -> Traced: ...
        def __rsub__(self, other: Any) -> Traced: ...


def plain(value: Any) -> Any:
    """Return the plain value of a number, or of those in a tuple or list."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(plain, value))
    return value.value if isinstance(value, Traced) else value


def _apply(name: str, *operands: Any) -> Traced:
    """Return the result of an operation on integers, or on floats if one operand is a float, or for a division."""
    made = [v if isinstance(v, Traced) else Traced(v, constant(v)) for v in operands]
    ours = next(v for v in operands if isinstance(v, Traced))
    if any(type(v.value) not in NUMBERS for v in made):
        ours.escape(f"{name} of it and a {type(made[-1].value).__name__}")
    if name == "div" or any(type(v.value) is float for v in made):
        name = f"f{name}"
        made = [v if type(v.value) is float else _operation("float", v) for v in made]
    return _operation(name, *made)


def _operation(name: str, *operands: Traced) -> Traced:
    every = inputs_of([v.expression for v in operands])
    if name not in OPERATIONS:
        raise NumberEscaped(every, f"{name} of it")
    try:
        value = OPERATIONS[name](*[v.value for v in operands])
    except (ZeroDivisionError, OverflowError) as error:
        raise NumberEscaped(every, str(error)) from None
    expression = (name, *[v.expression for v in operands])
    kind = followed if any(isinstance(v, FOLLOWED) for v in operands) else Traced
    return kind(value, expression, 1 + sum(v.size for v in operands))


def _operator(name: str, is_reflected: bool) -> Callable[..., Traced]:
    def method(self: Traced, *other: Any) -> Traced:
        return _apply(name, *other, self) if is_reflected else _apply(name, self, *other)

    return method


def largest(*values: Any) -> Any:
    """Python's `max`, of traced integers, too."""
    return functools.reduce(_larger, values) if any(isinstance(v, Traced) for v in values) else max(*values)


def smallest(*values: Any) -> Any:
    """Python's `min`, of traced integers, too."""
    return -largest(*[-v for v in values]) if any(isinstance(v, Traced) for v in values) else min(*values)


def _larger(a: Any, b: Any) -> Any:
    return _apply("max", a, b) if isinstance(a, Traced) or isinstance(b, Traced) else max(a, b)


def decide(name: str, number: Any) -> None:
    """Note that launches are for numbers with which this one is `name`: positive, nonzero or zero."""
    if isinstance(number, Traced):
        assert decisions.value is not None
        decisions.value[name, number.expression] = None


def _compare(asked: str, compare: Callable[[int, int], bool], self: Traced, other: Any = 0) -> bool:
    value = plain(other)
    if decisions.value is None or type(self.value) is not int or type(value) is not int:
        self.escape(f"its value is asked for ({asked})")
    outcome, difference = compare(self.value, value), self - other
    if compare in (operator.eq, operator.ne):
        decide("zero" if self.value == value else "nonzero", difference)
    elif compare in (operator.gt, operator.le):
        decide("positive", difference if self.value > value else -difference + 1)
    else:
        decide("positive", -difference if self.value < value else difference + 1)
    return outcome


def _comparing(asked: str, compare: Callable[[int, int], bool]) -> Callable[..., bool]:
    return lambda *operands: _compare(asked, compare, *operands)


def _escaping(name: str) -> Callable[..., Any]:
    def method(self: Traced, *_: Any) -> Any:
        self.escape(f"its value is asked for ({name})")

    return method


_OPERATORS = {"add": "add", "sub": "sub", "mul": "mul", "floordiv": "floordiv", "mod": "mod", "truediv": "div"}
for _method, _name in _OPERATORS.items():
    setattr(Traced, f"__{_method}__", _operator(_name, False))
    setattr(Traced, f"__r{_method}__", _operator(_name, True))
Traced.__neg__ = _operator("neg", False)  # type: ignore[attr-defined]

for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Traced, f"__{_name}__", _comparing(f"__{_name}__", getattr(operator, _name)))
Traced.__bool__ = _comparing("__bool__", operator.ne)  # type: ignore[attr-defined]

_ASKED = "int index float complex hash str format round abs len iter getitem contains invert"
_ASKED += " and rand or ror xor rxor lshift rlshift rshift rrshift divmod rdivmod rpow"
for _method in _ASKED.split():
    setattr(Traced, f"__{_method}__", _escaping(f"__{_method}__"))


class FollowedInt(Traced, int):  # type: ignore[misc]
    def __new__(cls, value: int, *_: Any) -> FollowedInt:
        return int.__new__(cls, value)


class FollowedFloat(Traced, float):  # type: ignore[misc]
    def __new__(cls, value: float, *_: Any) -> FollowedFloat:
        return float.__new__(cls, value)


FOLLOWED = FollowedInt, FollowedFloat


def followed(value: Any, expression: Expression, size: int = 0) -> Any:
    """Return a number that is traced as long as code only computes with it, and else an ordinary one."""
    return (FollowedFloat if type(value) is float else FollowedInt)(value, expression, size)


def _or_plain(name: str, traced: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Traced, *others: Any) -> Any:
        try:
            return traced(self, *others)
        except NumberEscaped:
            return getattr(self.value, name)(*plain(others))

    return method


for _kind, _base in ((FollowedInt, int), (FollowedFloat, float)):
    for _name in vars(Traced).keys() & vars(_base).keys() - {"__new__", "__init__", "__repr__", "__doc__"}:
        _is_asked = _name.strip("_") in _ASKED.split()
        setattr(_kind, _name, getattr(_base, _name) if _is_asked else _or_plain(_name, getattr(Traced, _name)))


def perturbed(value: Any) -> Any:
    """Return another number of the same type, for a second capture."""
    if type(value) is int:
        return value + 1 if value != (1 << 31) - 1 else value - 1
    changed = value + 1.0
    return changed if changed - value == 1.0 else 0.5


def slots_of(uses: Sequence[NumberSlot], numbers: Mapping[int, Any], graph: CapturedGraph) -> tuple[NumberSlot, ...]:
    """Return the number slots of a captured graph: the `uses`, which name their node by its handle yet. `numbers`: the
    values of the traced inputs in the capture. Raises `NumberEscaped` if a parameter is not what its expression says.
    """
    index_of = {node.handle: node.index for node in graph.nodes} if uses else {}
    found = []
    for use in uses:
        if (index := index_of.get(use.node)) is None:
            raise NumberEscaped(inputs_of([use.expression]), "a kernel that gets it is not in the graph")
        slot = use._replace(node=index)
        node = graph.nodes[index]
        try:
            expected = pack(slot.letter, evaluate(slot.expression, numbers))
        except Unfit as error:
            raise NumberEscaped(inputs_of([slot.expression]), str(error)) from None
        held = node.parameters[slot.parameter][1] if slot.parameter < len(node.parameters) else None
        if not isinstance(node, KernelNode) or held != expected:
            raise NumberEscaped(inputs_of([slot.expression]), f"a parameter of {node.name} is not what was computed")
        found.append(slot)
    return tuple(found)


def with_numbers_of(graph: CapturedGraph, like: CapturedGraph, slots: Sequence[NumberSlot]) -> CapturedGraph:
    """Return the graph with the parameters of another one where number slots are: for the proof, they are equal."""
    nodes = list(graph.nodes)
    for slot in slots:
        node = nodes[slot.node]
        assert isinstance(node, KernelNode)
        values = list(node.parameters)
        values[slot.parameter] = like.nodes[slot.node].parameters[slot.parameter]
        nodes[slot.node] = dataclasses.replace(node, parameters=tuple(values))
    return dataclasses.replace(graph, nodes=tuple(nodes))


def values_of(slots: Sequence[NumberSlot], inputs: Any, others: Sequence[Expression] = ()) -> list[bytes]:
    """Return the bytes of each slot for these inputs. Raises `Unfit`, for the `others`, too."""
    for expression in others:
        evaluate(expression, inputs)
    return [pack(slot.letter, evaluate(slot.expression, inputs)) for slot in slots]


POINTER_LETTER = "O"  # of torch's static launcher
COMPARING = {"max": largest, "min": smallest}  # among the builtins of generated code


class Launches:
    def __init__(self, nodes: Callable[[], Sequence[int]]) -> None:
        """`nodes()` returns the handles of the nodes that the captured graph has so far."""
        self.nodes = nodes
        self.uses: list[NumberSlot] = []  # by the handle of the node

    def launch(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, Traced)]
        if not given:
            return kernel.run(*args, **kwargs)
        before = set(self.nodes())
        named = {name: plain(value) for name, value in kwargs.items()}
        result = kernel.run(*map(plain, args), **named)  # before its launcher is asked: this may choose the launcher
        made = [node for node in self.nodes() if node not in before]
        launcher, binary = static_binary_of(kernel)
        if len(made) != 1 or launcher is None:
            _escape(given, "a kernel that gets it is not launched once, by torch's static launcher")
        letters = binary.arg_tys

        def note(x: Any, y: Any, z: Any, stream: Any, *arguments: Any) -> None:
            if blocks := [v for v in (x, y, z) if isinstance(v, Traced)]:
                _escape(blocks, "the grid of a kernel is computed from it")
            for number, value in enumerate(arguments):
                if isinstance(value, Traced):
                    if number >= len(letters) or letters[number] not in TYPES:
                        _escape([value], "a kernel takes it as a type that launches do not convert")
                    self.uses.append(NumberSlot(made[0], number, letters[number], value.expression))

        show(launcher, note, args, kwargs)
        return result


def show(launcher: Any, note: Callable[..., None], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run a static launcher with `note` in place of the function that launches: (x, y, z, stream, *arguments)."""
    called = type(launcher)(launcher.__code__, {**launcher.__globals__, **COMPARING, "runner": note})
    called(*args, **kwargs)


@contextlib.contextmanager
def replaced(namespace: dict[str, Any], stand_ins: Mapping[str, Any]) -> Iterator[None]:
    """Replace globals of a generated module, builtins among them."""
    originals = {name: namespace[name] for name in stand_ins if name in namespace}
    try:
        namespace.update(stand_ins)
        yield
    finally:
        namespace.update(originals)
        for name in stand_ins.keys() - originals:
            namespace.pop(name, None)


def _escape(values: Sequence[Traced], how: str) -> NoReturn:
    raise NumberEscaped(inputs_of([v.expression for v in values]), how)


class LaunchedBy:
    """Stands for a kernel among the globals of a generated module: `launch(kernel, ...)` runs it."""

    def __init__(self, kernel: Any, launch: Callable[..., Any]) -> None:
        self._kernel, self.run = kernel, functools.partial(launch, kernel)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


def noted(namespace: dict[str, Any], launches: Launches) -> contextlib.AbstractContextManager[None]:
    """Note the launches with traced numbers by the kernels of the generated module with these globals. Other threads
    have no such numbers, and what stands for a global does the same as that for them."""
    kernels = {name: v for name, v in namespace.items() if hasattr(v, "launchers") and hasattr(v, "run")}
    made = {name: LaunchedBy(kernel, launches.launch) for name, kernel in kernels.items()}
    return replaced(namespace, {**made, **COMPARING})
