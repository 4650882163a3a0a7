"""What a relaunch program is, and what it is written with.

A program is a short user session: it compiles functions, calls them, does to inputs and outputs what users do, and
shows what it sees. The same text runs on several *sides*, which differ only in what `k.compile` means:

    eager    nothing: the function itself
    traced   Dynamo and AOTAutograd, no code generation (backend "aot_eager"); the side for machines without a GPU
    plain    torch.compile without CUDA graphs
    graphs   torch.compile(mode="reduce-overhead")

    @program("an output is overwritten by the next call")
    def outputs_stay(k: Kit) -> None:
        f = k.compile(lambda x: x * 2)
        held = [f(k.randn(64)) for _ in k.steps()]
        k.see("all outputs", held)

All sides draw the same numbers from one generator, so what they see must be equal. Seen tensors are cloned at once, on
the current stream and without a synchronisation, and compared at the end. Nobody calls cudagraph_mark_step_begin.

Between two calls `steps` frees and fills memory: freed blocks are poisoned, fresh inputs land at other addresses. A
graph that remembers an address reads NaN, or writes where the next check looks.
"""

import collections
import contextlib
import dataclasses
import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree


CALLS = 8  # run as compiled, capture, and six relaunches

_outliving: list[Any] = []  # what programs leave to the exit of the process


class Kit:
    """What a program is written with. One for each run of a program on one side."""

    def __init__(self, side: str, device: str) -> None:
        self.side, self.device = side, device
        self.gpu = device == "cuda"
        self.seen: list[tuple[str, Any]] = []
        self.generator = torch.Generator().manual_seed(20)
        self._choice = random.Random(20)
        self._fillers: collections.deque[torch.Tensor] = collections.deque(maxlen=4)

    @property
    def graphs(self) -> bool:
        return self.side == "graphs"

    def compile(self, fn: Any, **kwargs: Any) -> Any:
        return fn if self.side == "eager" else torch.compile(fn, **self._how(), **kwargs)

    def compile_in_place(self, module: torch.nn.Module) -> None:
        """As `module.compile()`."""
        if self.side != "eager":
            module.compile(**self._how())

    def _how(self) -> dict[str, Any]:
        if self.side == "traced":
            return {"backend": "aot_eager"}
        return {"mode": "reduce-overhead" if self.graphs else None}

    # ---- inputs, the same on every side, at other addresses each time

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
        return self.place(torch.randn(shape, generator=self.generator).to(dtype)).requires_grad_(grad)

    def randint(self, high: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return self.place(torch.randint(low, high, shape, generator=self.generator).to(dtype))

    def place(self, value: torch.Tensor) -> torch.Tensor:
        """The value in fresh memory of the device, now and then after a block of the same size."""
        if self._choice.random() < 0.5:
            self._fillers.append(poisoned(value.numel() * value.element_size(), self.device))
        fresh = torch.empty_like(value, device=self.device)
        return fresh.copy_(value)

    def module(self, module: torch.nn.Module, dtype: torch.dtype | None = None) -> Any:
        """The module on the device, its parameters drawn anew, small enough for chains of products."""
        with torch.no_grad():
            for p in module.parameters():
                scale = (p.shape[-1] if p.dim() > 1 else 16) ** -0.5
                p.copy_(torch.randn(p.shape, generator=self.generator) * scale)
        return module.to(self.device, dtype)

    # ---- calls

    def steps(self, count: int = CALLS) -> Iterator[int]:
        for i in range(count):
            self.churn()
            yield i

    def churn(self) -> None:
        """Memory as another part of the user's program would leave it: freed blocks full of NaN."""
        sizes = [512, 4096, 16_384, 65_536, 1 << 20, 3 << 20]
        held = [poisoned(size, self.device) for size in self._choice.sample(sizes, 4)]
        self._fillers.append(held[self._choice.randrange(4)])

    # ---- what a program sees

    def see(self, what: str, value: Any) -> None:
        self.seen.append((what, pytree.tree_map(_clone, value)))

    def raises(self, what: str, fn: Callable[[], Any]) -> None:
        """Sees the class of the exception that fn() raises, or that it returns."""
        try:
            fn()
        except Exception as e:
            self.seen.append((what, type(e).__name__))
            # Its traceback holds the frames of the call, hence their tensors.
            e.__traceback__ = None
        else:
            self.seen.append((what, "no exception"))

    def outlives(self, value: Any) -> None:
        """Keep the value alive until the interpreter exits. Only for programs with a process of their own."""
        _outliving.append(value)

    # ---- the device, where it is a GPU

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def stream(self) -> Any:
        return torch.cuda.Stream() if self.gpu else None

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """On the stream, after the work of the current one; the current one goes on after it."""
        if stream is None:
            yield
            return
        outer = torch.cuda.current_stream()
        stream.wait_stream(outer)
        with torch.cuda.stream(stream):
            yield
        outer.wait_stream(stream)

    @contextlib.contextmanager
    def little_memory(self, mebibytes: int) -> Iterator[None]:
        """The process may take this much more than it has now. Needs a process of its own; nothing without a GPU."""
        if not self.gpu:
            yield
            return
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (mebibytes << 20)) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


def _clone(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def poisoned(nbytes: int, device: str) -> torch.Tensor:
    return torch.full((max(nbytes, 4) // 4,), float("nan"), device=device)


@dataclasses.dataclass(frozen=True)
class Program:
    """`hazard` says what goes wrong with graphs that get this program wrong; `#n` is an issue of pytorch/pytorch.

    - launches: at least so many graph launches must be counted on the side with graphs
    - captures: at most so many graphs may be made, if it is not None
    - steps: at least so many calls must run as steps of C, and no size is captured; 0: each size is, at once
    - library_calls: at least so many calls of libraries must be launched as entries, by steps
    - refusals: regions of the program may be refused
    - oracles: the sides that the one with graphs is compared with
    - loose: factor on the tolerance against eager, for programs that compute in low precision in another order
    - random: draws random numbers, which eager and compiled code do not share
    - alone: needs a process of its own, whose exit is checked; `env` is set for it, for all sides
    - exclusive: alone, and no other process may use the device
    - ranks: runs as so many processes of a group, on as many devices
    - config: options of the overlay on the side with graphs
    - gpu_only: needs kernels or objects that only a GPU has
    """

    name: str
    hazard: str
    body: Callable[[Kit], None]
    launches: int = 1
    captures: int | None = None
    steps: int = 0
    library_calls: int = 0
    refusals: bool = False
    oracles: tuple[str, ...] = ("plain", "eager")
    loose: float = 1.0
    random: bool = False
    alone: bool = False
    exclusive: bool = False
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    ranks: int = 1
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    gpu_only: bool = False
    group: str = ""


PROGRAMS: list[Program] = []


def program(hazard: str, **fields: Any) -> Callable[[Callable[[Kit], None]], Program]:
    """Decorates a body: its name is the program's, its module's the group."""

    def register(body: Callable[[Kit], None]) -> Program:
        module = inspect.getmodule(body)
        group = module.__name__.rpartition(".")[2] if module else ""
        if fields.get("random"):
            fields.setdefault("oracles", ("plain",))
        made = Program(body.__name__, hazard, body, group=group, **fields)
        PROGRAMS.append(made)
        return made

    return register


def by_name(name: str) -> Program:
    return next(p for p in PROGRAMS if p.name == name)
