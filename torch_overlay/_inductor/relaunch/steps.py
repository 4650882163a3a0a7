"""Runs generated code as steps: what it does outside of kernels is data, which C runs for any size.

    steps = Steps(model, code, device)
    result = steps.run(inputs)          # as the model, whose list of inputs is empty afterwards

Note [Code as steps]
Generated code is a list of calls: functions allocate memory, make views, call a library, check, and launch kernels.
Python takes longer for it than the device where sizes are small, and a size that a graph wasn't captured for pays that.
1. A call with `followed` numbers shows the steps (`Follower`): each function with its arguments, which are tensors,
   constants, and expressions of the region's numbers. The functions among the globals of the generated module note
   what they are called with, and a dispatch mode notes the operators that code calls in another way. The call runs as
   usual meanwhile, so no step is taken twice.
2. What code does with a number unnoticed, a second call with other numbers shows: then its steps aren't the same.
   Numbers that were the same in both calls are conditions. A call in which one has another value is followed again.
   Comparisons of numbers are conditions, too, and a call with another outcome runs as it is.
3. C takes the steps (`csrc/steps.c`): it computes the numbers, launches Triton's kernels by the driver, and calls all
   other functions as generated code does, on tensors that it drops after their last use. So memory is allocated and
   freed as before. Libraries choose what they launch, once for each kind of call: Note [Library calls as entries].
Code is run as it is where it uses a global, a context or an object that isn't known here (`why_not`), among them
streams; where another dispatch mode is active; and for numbers that lead to other steps.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import itertools
import math
import threading
import types
import weakref
from typing import Any, NamedTuple, TYPE_CHECKING, TypeAlias

import torch
from torch._dynamo.utils import counters
from torch._inductor.select_algorithm import extern_kernels
from torch.utils._python_dispatch import TorchDispatchMode

from torch_overlay._inductor.relaunch.capture import calls
from torch_overlay._inductor.relaunch.capture.allocations import ALLOCATOR, function_of, namespace_of
from torch_overlay._inductor.relaunch.capture.branches import choose
from torch_overlay._inductor.relaunch.capture.make_graph import capturing
from torch_overlay._inductor.relaunch.causes import log
from torch_overlay._inductor.relaunch.keys import bit_key
from torch_overlay._inductor.relaunch.launch import executable
from torch_overlay._inductor.relaunch.numbers.expressions import constant, LETTERS, pack, RegisterProgram, TYPES, Unfit
from torch_overlay._inductor.relaunch.numbers.traced import (
    COMPARING,
    decisions,
    followed,
    LaunchedBy,
    NUMBERS,
    plain,
    POINTER_LETTER,
    replaced,
    show,
    Traced,
)
from torch_overlay._inductor.relaunch.proof.functions import static_binary_of


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch_overlay._inductor.relaunch.capture.device import Cuda
    from torch_overlay._inductor.relaunch.numbers.expressions import Expression

MOST = 6  # calls that are followed
GRID = "I"  # the type of a number of blocks
WARP = 32
UNNOTED = "get_raw_stream", "device"  # functions without an effect
IN_CUDA = "_DeviceGuard", "set_device"
CHECKS = "assert_"  # return True, or raise
OPERATORS = torch._ops.OpOverload, torch._ops.OpOverloadPacket
VALUES = torch.dtype, torch.layout, torch.memory_format, torch.device


CALL, TUPLE, LIST, KERNEL, ENTRY = range(5)  # kinds of steps, as in the C source
WORD, CONSTANT, NUMBER, SLOT = range(4)  # what a step takes: places are in this order
Operand: TypeAlias = "tuple[int, int]"  # one of these, and its number among them
ADDRESS = "K"  # the type of a word


class Step(NamedTuple):
    """A step in the form that C reads, but for the places. A tuple or list that a step takes is made by one before it.
    `items`: positions + 1 in what a call returns, or 0 for the whole, of each result."""

    kind: int
    function: Any  # of a call; of a kernel: (handle, threads, shared bytes, label)
    names: tuple[str, ...]
    operands: tuple[Operand, ...]  # of a kernel: its grid, then its parameters
    items: tuple[int, ...]
    results: tuple[Operand, ...]


class Shown:
    """The steps of one call. Words are values of kernels' parameters, by type; constants, tensors among them (`known`),
    may be there only to live. The first slots are those of the inputs, and each tensor that a step makes has one, by
    which later steps take it. A tuple of numbers is made once a run, any other when a step takes it."""

    def __init__(self, known: Iterable[Any] = ()) -> None:
        self.steps: list[Step] = []
        self.words: dict[tuple[str, Expression], int] = {}
        self.constants: list[Any] = []
        self.numbers: dict[Expression, int] = {}
        self.sizes: dict[tuple[Operand, ...], Operand] = {}  # tuples of numbers
        self.slots = self.inputs = 0
        self.result: Operand = CONSTANT, 0
        self.values: dict[int, Any] = {}  # of the numbers among the inputs, by position
        self.decisions: dict[Expression, None] = {}
        self.why_not = ""  # why the steps can't be taken from C
        self._slot_of: dict[int, tuple[Callable[[], Any], Operand]] = {}
        self._known = {id(v) for v in known if isinstance(v, torch.Tensor)}

    def refuse(self, why: str) -> None:
        self.why_not = self.why_not or why

    def compared(self) -> Sequence[Any]:
        """Return all that is the same in calls with the same steps."""
        return self.steps, self.constants, list(self.words), list(self.numbers), self.result

    def add(self, value: Any = None) -> Operand:
        """Give a value a slot of its own."""
        made, self.slots = (SLOT, self.slots), self.slots + 1
        if isinstance(value, torch.Tensor):
            self._slot_of[id(value)] = weakref.ref(value), made
        return made

    def operand(self, value: Any) -> Operand:
        if isinstance(value, Traced):
            return NUMBER, self.numbers.setdefault(value.expression, len(self.numbers))
        if isinstance(value, (tuple, list)):
            return self._built(value)
        if isinstance(value, torch.Tensor):
            ref, slot = self._slot_of.get(id(value), (None, None))
            if slot is not None and ref is not None and ref() is value:
                return slot
            if id(value) not in self._known:
                self.refuse("it uses a tensor that no step made")
        if isinstance(value, dict):
            self.refuse("it passes a dict")
        return self._constant(value)

    def _constant(self, value: Any) -> Operand:
        self.constants.append(value)
        return CONSTANT, len(self.constants) - 1

    def _built(self, value: Any) -> Operand:
        items, kind = tuple(map(self.operand, value)), LIST if type(value) is list else TUPLE
        kinds = {each for each, _ in items}
        if kind == TUPLE and kinds <= {CONSTANT}:
            return self._constant(tuple(value))
        if kind == TUPLE and items in self.sizes:
            return self.sizes[items]
        made = self.add()
        self.steps.append(Step(kind, None, (), items, (0,), (made,)))
        if kind == TUPLE and SLOT not in kinds:
            self.sizes[items] = made
        return made

    def note_call(self, function: Any, names: tuple[str, ...], operands: tuple[Operand, ...], result: Any) -> None:
        made = list(enumerate(result, start=1)) if isinstance(result, (tuple, list)) else [(0, result)]
        is_read = type(result) in (*NUMBERS, bool) and not _name(function).startswith(CHECKS)
        if is_read or any(isinstance(v, (tuple, list)) for _, v in made):
            self.refuse(f"{_name(function)} returns what is no tensor")
        # Also a result that is an argument gets a slot: at another call, it may be a copy.
        kept = [(i, self.add(v)) for i, v in made if isinstance(v, torch.Tensor)]
        items, results = tuple([i for i, _ in kept]), tuple([slot for _, slot in kept])
        kind = ENTRY if calls.may_be_entry(function, names) else CALL
        self.steps.append(Step(kind, function, calls.shared(names), operands, items, results))

    def note_kernel(self, binary: Any, grid: Sequence[Any], arguments: Sequence[Any]) -> bool:
        """Note a launch by torch's static launcher, if its numbers fit."""
        if len(arguments) != len(binary.arg_tys) or not all(map(_fits, binary.arg_tys, arguments)):
            return False
        operands = [self._word(GRID, v) for v in grid]
        operands += [self._parameter(letter, v) for letter, v in zip(binary.arg_tys, arguments)]
        for scratch in ("has_global_scratch", "has_profile_scratch"):
            operands += [self._word(ADDRESS, 0)] if getattr(binary, scratch, False) else []
        self._constant(binary)
        function = binary.function, WARP * binary.num_warps, binary.shared, binary.name
        self.steps.append(Step(KERNEL, function, (), tuple(operands), (), ()))
        return True

    def _word(self, letter: str, value: Any) -> Operand:
        expression = value.expression if isinstance(value, Traced) else constant(value)
        return WORD, self.words.setdefault((letter, expression), len(self.words))

    def _parameter(self, letter: str, value: Any) -> Operand:
        if letter != POINTER_LETTER:
            return self._word(letter, value)
        kind, number = (CONSTANT, 0) if value is None else self.operand(value)
        if kind == SLOT:
            return kind, number
        return self._word(ADDRESS, 0 if value is None else value.data_ptr())

    def arguments(self, conditions: Sequence[Expression]) -> dict[str, Any]:
        """Return what C takes."""
        made = len(self.words), len(self.constants), len(self.numbers), self.slots
        starts = [0, *itertools.accumulate(made)]

        def places(operands: Iterable[Operand]) -> tuple[int, ...]:
            return tuple([starts[kind] + number for kind, number in operands])

        steps = [
            (*step[:3], places(step.operands), step.items, places(step.results), places(drops))
            for step, drops in zip(self.steps, self._drops(), strict=True)
        ]
        return {
            "numbers": RegisterProgram.of([e for _, e in self.words] + [*self.numbers], conditions),
            "words": tuple([LETTERS.index(letter) for letter, _ in self.words]),
            "constants": tuple(self.constants),
            "steps": tuple(steps),
            "result": places([self.result])[0],
            "objects": starts[-1] - len(self.words),
            "inputs": self.inputs,
        }

    def _drops(self) -> list[list[Operand]]:
        """Return for each step the slots that no later one takes, and that aren't returned."""
        last: dict[Operand, int] = {}
        for i, step in enumerate(self.steps):
            last |= dict.fromkeys([v for v in (*step.operands, *step.results) if v[0] == SLOT], i)
        last.pop(self.result, None)
        drops: list[list[Operand]] = [[] for _ in self.steps]
        for operand, i in last.items():
            drops[i].append(operand)
        return drops


def _fits(letter: str, value: Any) -> bool:
    if letter == POINTER_LETTER or isinstance(value, torch.Tensor):
        return letter == POINTER_LETTER and (isinstance(value, torch.Tensor) or value is None)
    with contextlib.suppress(Unfit, TypeError, ValueError, OverflowError):
        return bool(pack(letter, plain(value)))
    return False


class Follower(TorchDispatchMode):
    """Notes the steps of one call of generated code, in this thread."""

    def __init__(self, device: Cuda, namespace: Mapping[str, Any]) -> None:
        super().__init__()
        self.thread, self.stream = threading.get_ident(), device.stream_of(device.index)
        self.device, self.shown = device, Shown(namespace.values())
        self.refuse = self.shown.refuse
        self._depth = 0  # inside a noted function

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, and note it."""
        given = plain(args), {name: plain(value) for name, value in kwargs.items()}
        if self._depth or threading.get_ident() != self.thread:
            return function(*given[0], **given[1])
        operands: tuple[Operand, ...] = ()
        with self.noting():
            operands = tuple(map(self.shown.operand, (*args, *kwargs.values())))
        result = self._inside(function, given)
        with self.noting():
            self.shown.note_call(function, tuple(kwargs), operands, result)
            if self.device.stream_of(self.device.index) != self.stream:
                self.refuse("it changes the current stream")
        return result

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Code runs on, whatever comes of the notes."""
        try:
            yield
        except Exception as error:
            self.refuse(f"{type(error).__name__}: {error}")

    def _inside(self, function: Any, given: tuple[Sequence[Any], Mapping[str, Any]]) -> Any:
        self._depth += 1
        try:
            return function(*given[0], **given[1])
        finally:
            self._depth -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._depth and not isinstance(func, torch._ops.OpOverload):
            self.refuse(f"it calls {_name(func)}")
        return self.call(func, *args, **(kwargs or {}))

    def launch(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        """Launch a Triton kernel, and note how its launcher does it; or as a call that finds the stream at each run."""
        if self._depth or threading.get_ident() != self.thread:
            return kernel.run(*args, **kwargs)
        named = {name: plain(value) for name, value in kwargs.items()}
        if named.get("stream") != self.stream:
            self.refuse("it launches a kernel on another stream")
        result = self._inside(kernel.run, (plain(args), named))
        with self.noting():
            if not self._noted_as_kernel(kernel, args, kwargs):
                rest = {name: value for name, value in kwargs.items() if name != "stream"}
                operands = tuple(map(self.shown.operand, (*args, *rest.values())))
                self.shown.note_call(_OnStream(kernel, self.device), tuple(rest), operands, None)
        return result

    def _noted_as_kernel(self, kernel: Any, args: Any, kwargs: Any) -> bool:
        """Note a launch by torch's static launcher; return False if it is another one."""
        launcher, binary = static_binary_of(kernel)
        if launcher is None or set(kwargs) != {"stream"} or not getattr(kernel, "_cache_eligible", False):
            return False
        if not set(binary.arg_tys) <= {POINTER_LETTER, *TYPES} or not binary.function:
            return False
        if getattr(binary, "global_scratch_size", 0) or getattr(binary, "device_agnostic", False):
            return False
        made: list[bool] = []

        def note(x: Any, y: Any, z: Any, stream: Any, *arguments: Any) -> None:
            made.append(self.shown.note_kernel(binary, (x, y, z), arguments))

        try:
            show(launcher, note, args, kwargs)
        except Exception as error:  # a launcher that does more than to compute a grid
            log.info("%s is launched from Python: %s", getattr(binary, "name", "a kernel"), error)
        return any(made)


class _OnStream:
    """Runs a kernel by its own launcher, on the stream that is current."""

    def __init__(self, kernel: Any, device: Cuda) -> None:
        self.kernel, self.device = kernel, device

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.kernel.run(*args, stream=self.device.stream_of(self.device.index), **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OnStream) and other.kernel is self.kernel

    def __hash__(self) -> int:
        return id(self.kernel)


class _Noted:
    """Stands for a function, or for what has functions, such as `extern_kernels` and `torch.ops.aten`."""

    def __init__(self, target: Any, follower: Follower) -> None:
        self._target, self._follower = target, follower

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._follower.call(self._target, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return _Noted(getattr(self._target, name), self._follower)


class _Torch:
    """Stands for the module `torch`, or for `torch.cuda`, of which only `known` names may be used."""

    def __init__(self, follower: Follower, module: Any, known: Sequence[str] | None = None) -> None:
        self._follower, self._module, self._known = follower, module, known

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if threading.get_ident() != self._follower.thread:
            return value
        if self._known is not None:
            if name not in self._known:
                self._follower.refuse(f"it uses torch.cuda.{name}")
            return value
        if name == "cuda":
            return _Torch(self._follower, value, IN_CUDA)
        if isinstance(value, (*VALUES, type)):
            return value
        if name != "ops" and (isinstance(value, types.ModuleType) or not callable(value)):
            self._follower.refuse(f"it uses torch.{name}")
            return value
        return _Noted(value, self._follower)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function))


def _codes(model: Any, namespace: dict[str, Any]) -> Iterator[types.CodeType]:
    """Yield the code of a generated function, and of those of its module that it uses."""
    waiting, seen = [function_of(model).__code__], set()
    while waiting:
        if (code := waiting.pop()) in seen:
            continue
        seen.add(code)
        yield code
        used: list[Any] = [namespace.get(name) for name in globals_of(code)]
        waiting += [v.__code__ for v in used if _is_own(v, namespace)]
        waiting += [v for v in code.co_consts if isinstance(v, types.CodeType)]


def _is_own(value: Any, namespace: Mapping[str, Any]) -> bool:
    return isinstance(value, types.FunctionType) and value.__globals__ is namespace


def globals_of(code: types.CodeType) -> set[str]:
    return {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def stand_ins(model: Any, namespace: dict[str, Any], follower: Follower) -> dict[str, Any]:
    """Return what takes the place of the globals that generated code uses."""
    made: dict[str, Any] = {}
    for code in _codes(model, namespace):
        if "partitions" in code.co_names:
            follower.refuse("it calls partitions")
        for name in globals_of(code):
            value = namespace[name] if name in namespace else getattr(builtins, name)
            if name in COMPARING:
                made[name] = COMPARING[name]
            elif value is choose:
                follower.refuse("a tensor chooses a branch of it")
            elif value is torch:
                made[name] = _Torch(follower, torch)
            elif value is extern_kernels or isinstance(value, (torch._ops._OpNamespace, *OPERATORS)):
                made[name] = _Noted(value, follower)
            elif hasattr(value, "run") and not isinstance(value, types.ModuleType):
                made[name] = LaunchedBy(value, follower.launch)
            elif value is math or name in UNNOTED or _is_own(value, namespace) or name not in namespace:
                continue
            elif callable(value) and not isinstance(value, type):
                made[name] = _Noted(value, follower)
            elif not isinstance(value, (torch.Tensor, int, float, str, type, *VALUES, type(None))):
                follower.refuse(f"it uses {name}")
    return made


def follow(model: Callable[[list[Any]], Any], inputs: list[Any], device: Cuda) -> tuple[Any, Shown]:
    """Run generated code. Return its result, and the steps that it took."""
    namespace = namespace_of(model)
    follower = Follower(device, namespace)
    shown = follower.shown
    shown.inputs, shown.values = len(inputs), {k: v for k, v in enumerate(inputs) if type(v) in NUMBERS}
    for value in inputs:
        shown.add(value)
        if not isinstance(value, (torch.Tensor, type(None))) and type(value) not in NUMBERS:
            follower.refuse(f"an input is a {type(value).__name__}")
    inputs[:] = [followed(v, ("input", k, type(v))) if k in shown.values else v for k, v in enumerate(inputs)]
    made: dict[str, Any] = {}
    with follower.noting():
        made = stand_ins(model, namespace, follower)
    try:
        with replaced(namespace, made), follower, decisions.within(shown.decisions):
            result = model(inputs)
    finally:
        follower.thread = 0  # another thread may have taken a stand-in for the original meanwhile
    shown.result = shown.operand(tuple(result) if isinstance(result, (list, tuple)) else result)
    return plain(result), shown  # a number may be one of the followed


def is_same(a: Any, b: Any) -> bool:
    """True if two steps, or operands of them, are the same."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, (int, float, str)):
        return bit_key(a) == bit_key(b)
    return a is b or (isinstance(a, (*VALUES, _OnStream)) and a == b)


class Steps:
    """The code of a region, which is run as it is, or as steps. `why_not`: why it is never run as steps."""

    def __init__(self, model: Callable[[list[Any]], Any], device: Cuda) -> None:
        self.model, self.device = model, device
        self.why_not = ""
        self._in_c: Any = None
        self._before = 0  # runs of what it replaced
        self._first: Shown | None = None
        self._numbers: list[dict[int, Any]] = []  # of all calls that were followed
        self._left = MOST if ALLOCATOR in namespace_of(model) else 0

    @property
    def runs(self) -> int:
        """How many calls were run as steps."""
        return self._before + (self._in_c.runs if self._in_c is not None else 0)

    def run(self, inputs: list[Any]) -> Any:
        """Run the code: as steps, if it is known to be the same; else as it is, to note its steps or not."""
        if torch._C._len_torch_dispatch_stack():
            return self.model(inputs)
        in_c = self._in_c
        if in_c is not None and (result := in_c.run(inputs)) is not None:
            counters["torch_overlay"]["cudagraph_steps"] += 1
            return result
        # A capture replaces globals of the module, too.
        if not self._left or not capturing.acquire(blocking=False):
            return self.model(inputs)
        try:
            self._left -= 1
            result, shown = follow(self.model, inputs, self.device)
            try:
                self._learn(shown)
            except Exception as error:  # the code has run, and its result is what counts
                self._refuse(f"{type(error).__name__}: {error}")
            return result
        finally:
            capturing.release()

    def _refuse(self, why: str) -> None:
        self.why_not, self._left, self._first = why, 0, None
        log.info("code is run as it is: %s", why)

    def _learn(self, shown: Shown) -> None:
        """Have C take the steps once two calls have taken the same ones."""
        if shown.why_not:
            self._refuse(shown.why_not)
            return
        first = self._first = self._first or shown
        if shown.decisions.keys() != first.decisions.keys():
            return  # the steps are for the same outcomes
        self._numbers.append(shown.values)
        if not is_same(first.compared(), shown.compared()):
            pairs = zip((*first.steps, *first.constants), (*shown.steps, *shown.constants))
            other = next((f": {a}, and {b}" for a, b in pairs if not is_same(a, b)), "")
            self._refuse(f"two calls take different steps{other}"[:500])
            return
        varied = {k for each in self._numbers for k, v in each.items() if v != first.values[k]}
        if not varied and first.values:
            return
        pinned = {k: v for k, v in first.values.items() if k not in varied}
        if any(type(v) is float for v in pinned.values()):
            return
        conditions = [("zero", ("sub", ("input", k, int), constant(v))) for k, v in pinned.items()]
        conditions += first.decisions
        device, arguments = self.device, first.arguments(conditions)
        bound = device.index, device.current, device.stream_of, device.functions[0]
        self._before = self.runs
        entries = device.library_calls if any(step.kind == ENTRY for step in first.steps) else None
        self._in_c = executable.implementation().steps(**arguments, device=bound, calls=entries)
