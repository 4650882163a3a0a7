"""What a program is, how it is run, and what is expected of it."""

import contextlib
import dataclasses
import inspect
import linecache
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.utils._pytree as pytree


SIZE = 128
CALLS = 20


@dataclasses.dataclass
class Program:
    """- body: the function to compile, of x and w (SIZE x SIZE) and of what `inputs` makes
    - fixed: the same with the cause taken away: all of it is in graphs, with the same results
    - inputs: makes the inputs of call number n, beside x and w
    - causes: "CODE OPERATOR" of causes that no comment names
    - operator: what `*` stands for in a comment
    - region: code of the cause that keeps the function's code out of graphs, whatever the line
    - also: codes of causes that come with it, whatever the line
    - dynamo, inductor, overlay: options
    """

    name: str
    body: Callable[..., Any]
    fixed: Callable[..., Any] | None = None
    inputs: Callable[[int], tuple[Any, ...]] = lambda n: ()
    region: str = ""
    also: tuple[str, ...] = ()
    operator: str = ""
    causes: tuple[str, ...] = ()
    dynamic: bool | None = None
    backward: bool = False
    dynamo: dict[str, Any] = dataclasses.field(default_factory=dict)
    inductor: dict[str, Any] = dataclasses.field(default_factory=dict)
    overlay: dict[str, Any] = dataclasses.field(default_factory=dict)
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    compiled_at_once: bool = True  # the cause shows when the code is compiled, also on a simulated device

    def expected(self) -> set[tuple[str, str, str]]:
        """(code, operator, text of the line) of each cause."""
        found = {(code, "", "") for code in (self.region, *self.also) if code}
        found |= {(code, operator, "") for code, _, operator in (cause.partition(" ") for cause in self.causes)}
        for line in inspect.getsource(self.body).splitlines():
            if match := re.search(r"# outside: ([\w-]+) ?(\S*)", line):
                operator = self.operator if match[2] == "*" else match[2]
                found.add((match[1], operator, line.partition("#")[0].strip()))
        return found

    def differences(self, causes: Iterable[tuple[str, str, str]]) -> list[str]:
        """What is missing of the expected causes, and what is none of them, in words."""
        wanted, causes = self.expected(), set(causes)
        missing = [w for w in wanted if not any(matches(w, cause) for cause in causes)]
        others = [cause for cause in causes if not any(matches(w, cause) for w in wanted)]
        return [f"causes: {missing} are missing, {others} are not expected"] if missing or others else []

    def arguments(self, n: int) -> list[Any]:
        generator = torch.Generator().manual_seed(n)
        x, w = (torch.randn(SIZE, SIZE, generator=generator) / 12 for _ in range(2))
        made = [x.cuda(), w.cuda().requires_grad_(self.backward), *self.inputs(n)]
        return made

    @contextlib.contextmanager
    def options(self) -> Any:
        from torch_overlay import config

        with (
            torch._dynamo.config.patch(self.dynamo),
            inductor_config.patch(self.inductor),
            config.patch(cudagraphs="relaunch", **self.overlay),
        ):
            yield


def matches(wanted: tuple[str, str, str], cause: tuple[str, str, str]) -> bool:
    """True if the cause is the one that is wanted; an operator or a line that is not wanted may be any."""
    return wanted[0] == cause[0] and all(want in ("", have) for want, have in zip(wanted[1:], cause[1:]))


def causes_of(coverage: Any, seen: Any) -> set[tuple[str, str, str]]:
    """(code, operator, text of the line) of all work outside of graphs, and of the graph breaks."""
    causes = {(o.code, o.operator, text_of(o.line)) for f in coverage.functions for o in f.outside}
    causes |= {(o.code, o.operator, text_of(o.line)) for o in coverage.refused}
    return causes | {("graph-break", "", b.code.partition("#")[0].strip()) for b in seen.graph_breaks}


def text_of(line: str) -> str:
    """The text of "file:line: text", or of "file:line", without its comment."""
    file, _, rest = line.partition(".py:")
    number = rest.partition(":")[0]
    return linecache.getline(f"{file}.py", int(number)).partition("#")[0].strip() if number.isdigit() else ""


PROGRAMS: list[Program] = []


def program(**fields: Any) -> Callable[[Callable[..., Any]], Program]:
    def register(body: Callable[..., Any]) -> Program:
        made = Program(body.__name__, body, **fields)
        PROGRAMS.append(made)
        return made

    return register


def by_name(name: str) -> Program:
    return next(program for program in PROGRAMS if program.name == name)


def results(fn: Callable[..., Any], program: Program, n: int) -> list[torch.Tensor]:
    """All results and gradients of one call."""
    arguments = program.arguments(n)
    with program.around():
        found = fn(*arguments)
    leaves = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
    if program.backward:
        sum(leaf.float().sum() for leaf in leaves if leaf.requires_grad).backward()
        leaves.append(arguments[1].grad)
    return [leaf.detach().cpu().to_dense() if leaf.is_sparse else leaf.detach().cpu() for leaf in leaves]
