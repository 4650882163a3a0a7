"""What a program of the corpus is, and what it is built with.

A program is a function that a user might compile, together with all that a test needs to run it honestly: how to make
the function and its streams, how to make inputs, and what a correct caller does before reading the results
(`finish`).

    program = by_name("event_returned")
    instance = program.instance(program.compiler("reduce-overhead"))
    outputs = instance.finish(inputs, instance.fn(*inputs))

`instance()` without a compiler is the same program in eager, the oracle. Every instance has its own streams, events and
parameters, made from one seed, so two instances never share state and compute the same values. The oracle of an
`ordered` program runs on the current stream alone, wherever the program asks for another one: eager's autograd frees
what was saved as soon as its reader is launched, and autocast keeps its casts, without a thought for streams, so that
training programs which a compiler has to get right would race in eager. Tensors hold small whole
numbers, whose sums and products are exact in every dtype used here: results are compared bit by bit, in any order of
summation, unless a program states a tolerance.

`sleeps=True` puts operators that keep the stream busy at the places that a program calls `sleep`: a kernel that
starts too early then reads what isn't there yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from stream_programs import _ops


Inputs = tuple[Any, ...]
MakeInputs = Callable[[str, torch.Generator], Inputs]


class Kit:
    """What `build` functions make streams, parameters and frames with."""

    def __init__(self, compiler: Callable[..., Any] | None, sleeps: bool, one_stream: bool = False) -> None:
        self.compiler = compiler
        self.one_stream = one_stream
        self.streams: list[torch.Stream] = []
        self.sleep = _ops.asleep if sleeps else _ops.awake
        self.generator = torch.Generator().manual_seed(20)
        self.engine: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext  # of backwards

    def stream(self, cls: type[torch.Stream] = torch.cuda.Stream, **kwargs: Any) -> Any:
        """A stream that a test may delay."""
        if self.one_stream:
            return torch.cuda.current_stream()
        if cls is torch.Stream:
            kwargs.setdefault("device", "cuda")
        self.streams.append(cls(**kwargs))
        return self.streams[-1]

    def parameter(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return whole_numbers(*shape, dtype=dtype)("cuda", self.generator)

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """For programs of several frames, which compile their parts themselves."""
        return fn if self.compiler is None else self.compiler(fn)


@dataclasses.dataclass
class Instance:
    program: Program
    fn: Callable[..., Any]
    streams: list[torch.Stream]

    def finish(self, inputs: Inputs, outputs: Any) -> Any:
        """What a correct caller does on its current stream, so that it may read outputs and mutated inputs there."""
        return outputs if self.program.finish is None else self.program.finish(self, inputs, outputs)

    def join(self) -> None:
        """The current stream waits for every side stream of the program."""
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)


@dataclasses.dataclass(frozen=True)
class Program:
    """`hazard` says what goes wrong in a compiler that gets this program wrong; `#n` is an issue of pytorch/pytorch.

    `late_reader` says whose memory the results are in eager, "current" or "side" (the first side stream): a caller may
    read them there as late as it likes, and drop them at once, whatever other streams do.
    """

    name: str
    hazard: str
    build: Callable[[Kit], Callable[..., Any]]
    make_inputs: MakeInputs
    finish: Callable[[Instance, Inputs, Any], Any] | None = None
    fullgraph: bool = True
    frames: bool = False
    modes: tuple[str | None, ...] = (None, "reduce-overhead")
    dynamic: bool | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    devices: int = 1
    tolerance: float = 0.0
    random: bool = False
    host_reads: bool = False
    ordered: bool = False
    late_reader: str = ""
    group: str = ""

    def instance(self, compiler: Callable[..., Any] | None = None, sleeps: bool = False) -> Instance:
        kit = Kit(compiler, sleeps, one_stream=self.ordered and compiler is None)
        fn = self.build(kit)
        return Instance(self, fn if self.frames else kit.compile(fn), kit.streams)

    def compiler(self, mode: str | None = None) -> Callable[..., Any]:
        options: dict[str, Any] | None = None
        if self.options:
            options = {**(torch._inductor.list_mode_options(mode, self.dynamic) if mode else {}), **self.options}
            mode = None
        return functools.partial(
            torch.compile, mode=mode, options=options, fullgraph=self.fullgraph, dynamic=self.dynamic
        )


PROGRAMS: list[Program] = []


MADE: dict[Any, Callable[[Kit], Any]] = {
    inspect.Parameter.empty: lambda k: k.stream(),
    torch.Stream: lambda k: k.stream(torch.Stream),
    torch.cuda.Event: lambda k: torch.cuda.Event(),
    torch.Tensor: lambda k: k.parameter(64, 64),
}


def built(fn: Callable[..., Any], *given: Any) -> Callable[[Kit], Callable[..., Any]]:
    """A build function. A function with parameters ahead of a `/` is the program itself.

    Such a program is compiled as a closure over them with the other parameters, by their own names. They are what is
    `given`, and what the program keeps: streams, `sleep`, and what `MADE` makes for an annotation.
    """
    parameters = inspect.signature(fn, eval_str=True).parameters.values()
    kept = [p for p in parameters if p.kind is p.POSITIONAL_ONLY]
    names = [p.name for p in kept]
    if not names:
        return fn
    mine, inputs = ", ".join(names), ", ".join(str(p) for p in parameters if p.kind is not p.POSITIONAL_ONLY)
    makers = [(lambda k: k.sleep) if p.name == "sleep" else MADE[p.annotation] for p in kept[len(given) :]]
    text = "\n" * (fn.__code__.co_firstlineno - 1) + f"lambda fn, {mine}: lambda {inputs}: fn({mine}, {inputs})"
    close_over = eval(compile(text, fn.__code__.co_filename, "eval"))

    def build(k: Kit) -> Callable[..., Any]:
        return close_over(fn, *given, *(make(k) for make in makers))

    return build


def program(hazard: str, inputs: MakeInputs | None = None, **fields: Any) -> Callable[..., Program]:
    """Decorates a build function, or the program itself (`built`): its name is the program's, its module the group."""

    def register(fn: Callable[..., Any]) -> Program:
        module = inspect.getmodule(fn)
        group = module.__name__.rpartition(".")[2] if module else ""
        made = Program(fn.__name__, hazard, built(fn), inputs or matrices(1), group=group, **fields)
        PROGRAMS.append(made)
        return made

    return register


def by_name(name: str) -> Program:
    return next(p for p in PROGRAMS if p.name == name)


# ---- inputs


def whole_numbers(
    *shape: int, dtype: torch.dtype = torch.float32, low: int = -2, high: int = 2, pinned: bool = False, on: str = ""
) -> Callable[[str, torch.Generator], torch.Tensor]:
    """A tensor of whole numbers from low to high, on the device of the test or on the device `on`."""

    def make(device: str, generator: torch.Generator) -> torch.Tensor:
        values = torch.randint(low, high + 1, shape, generator=generator).to(dtype)
        return values.pin_memory() if pinned else values.to(on or device)

    return make


def tensors(*makers: Callable[[str, torch.Generator], Any]) -> MakeInputs:
    return lambda device, generator: tuple(make(device, generator) for make in makers)


def matrices(count: int, size: int = 64, **kwargs: Any) -> MakeInputs:
    return tensors(*[whole_numbers(size, size, **kwargs)] * count)


# ---- streams


def fork(*sides: torch.Stream) -> None:
    for side in sides:
        side.wait_stream(torch.cuda.current_stream())


def join(*sides: torch.Stream) -> None:
    for side in sides:
        torch.cuda.current_stream().wait_stream(side)


# ---- callers


def joins_all(instance: Instance, inputs: Inputs, outputs: Any) -> Any:
    """A caller that joins the program's side streams before it reads."""
    instance.join()
    return outputs


def synchronizes(instance: Instance, inputs: Inputs, outputs: Any) -> Any:
    """A caller that waits on the host, as it must before it reads host memory that a copy fills."""
    torch.cuda.synchronize()
    return outputs


def reads_input(instance: Instance, inputs: Inputs, outputs: Any) -> Any:
    """A caller that was promised, by the joins inside the function, that it may read the mutated input at once."""
    return outputs, inputs[0].clone()
