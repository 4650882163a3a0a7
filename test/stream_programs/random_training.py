"""Training programs drawn at random: streams, mutation, views, checkpoints and autocast in one function.

    print(source(7))        # the function of program `train_random_07`

Each drawn function follows a user's discipline: a block forks its stream from the current one, and whoever reads a
value has joined its stream. Weights are sparse and values are clamped, so
that sums stay small whole numbers and results can be compared exactly; under autocast they are compared with a
tolerance, since fused code rounds less often.
"""

import functools
import random
import re
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from stream_programs._program import fork, join, Kit, matrices, Program, PROGRAMS


COUNT = 60
SIZE = 64

UNARY = (
    "{a}.relu()",
    "{a}.clamp(-2, 2)",
    "{a}.clamp(max=1) * 2",
    "sleep({a})",
    "{a}.t()",
    "{a}.reshape(16, -1).relu().reshape(64, 64)",
    "torch.cat([{a}[32:], {a}[:32]])",
    "({a} @ w{w}).clamp(-2, 2)",
    "({a} @ w{w}).clamp(-2, 2)",
    "({a} @ w{w}).clamp(-2, 2)",
)
BINARY = ("({a} + {b}).clamp(-2, 2)", "{a}.clamp(-1, 1) * {b}", "{a} * {b}.detach().sign()", "{a} - {b}")


class _Writer:
    """Writes one function. A value is known by its name and by the stream that it was made on; 0 is the current one."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.streams = self.draw.choice((1, 2, 2, 3))
        self.weights = 3
        self.autocast = seed % 4 == 3
        self.lines: list[str] = []
        self.values: list[tuple[str, int]] = [("v0", 0)]
        self.unjoined: set[int] = set()
        self.differentiable = {"v0"}
        self.count = 0

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def operation(self, readable: list[str]) -> str:
        a, b = self.draw.choice(readable[-4:]), self.draw.choice(readable[-8:])
        if a == b and len(readable) > 1:
            b = readable[readable.index(a) - 1]
        template = self.draw.choice(UNARY if self.draw.random() < 0.65 else BINARY)
        return template.format(a=a, b=b, w=self.draw.randrange(self.weights))

    def readable(self, stream: int) -> list[str]:
        return [name for name, made_on in self.values if made_on in (0, stream) or made_on not in self.unjoined]

    def has_gradient(self, text: str) -> bool:
        read = re.findall(r"\bv\d+\b(?!\.detach)", text)
        return "@ w" in text or not self.differentiable.isdisjoint(read)

    def compute(self, stream: int, indent: str) -> None:
        names = self.readable(stream)
        for _ in range(self.draw.randint(1, 4)):
            name, text = self.fresh(), self.operation(names)
            self.lines.append(f"{indent}{name} = {text}")
            if self.has_gradient(text):
                self.differentiable.add(name)
            names.append(name)
            self.values.append((name, stream))

    def block(self) -> None:
        stream = self.draw.randint(1, self.streams)
        self.lines += [f"fork(s{stream})", f"with on(s{stream}):"]
        kind = self.draw.random()
        if kind < 0.2:
            self.checkpointed(stream)
        elif kind < 0.35:
            value = self.draw.choice(self.readable(stream))
            target = self.fresh()
            self.lines.append(f"    cache.add_({value}.detach().sign())")
            self.lines.append(f"    {target} = cache * 1")
            self.values.append((target, stream))
        else:
            self.compute(stream, "    ")
        self.unjoined.add(stream)

    def checkpointed(self, stream: int) -> None:
        argument, result, begin = self.draw.choice(self.readable(stream)), self.fresh(), len(self.lines)
        self.lines.append(f"    def again(y{self.count}):")
        names = [f"y{self.count}"]
        for i in range(self.draw.randint(2, 4)):
            names.append(f"{names[0]}_{i}")
            self.lines.append(f"        {names[-1]} = {self.operation(names[:-1])}")
        self.lines.append(f"        return {names[-1]}")
        # In eager, not under torch.compile, this kind gives weights no gradients unless the argument has one.
        reentrant = self.draw.random() < 0.3 and argument in self.differentiable
        self.lines.append(f"    {result} = checkpoint(again, {argument}, use_reentrant={reentrant})")
        if argument in self.differentiable or any("@ w" in line for line in self.lines[begin:]):
            self.differentiable.add(result)
        self.values.append((result, stream))

    def join(self) -> None:
        stream = self.draw.choice(sorted(self.unjoined))
        self.lines.append(f"join(s{stream})")
        self.unjoined.discard(stream)

    def write(self) -> str:
        # The cache is one tensor: two blocks must not write it unordered.
        for _ in range(self.draw.randint(3, 7)):
            choice = self.draw.random()
            if choice < 0.6:
                self.block()
            elif choice < 0.8 and self.unjoined:
                self.join()
            else:
                self.compute(0, "")
            if any("cache" in line for line in self.lines[-2:]):
                self.join_all()
        self.join_all()
        last = ["v0", *(name for name, _ in self.values[1:][-7:])]  # v0: the loss has a gradient in any case
        self.lines.append(f"return ({' + '.join(f'{name}.float()' for name in last)}).sum()")
        body = ["v0 = (x @ w0).clamp(-2, 2)", *self.lines]
        if self.autocast:
            body = ['with torch.autocast("cuda", torch.bfloat16):', *(f"    {line}" for line in body)]
        return "\n".join(["def forward(x, cache):", *(f"    {line}" for line in body)]) + "\n"

    def join_all(self) -> None:
        while self.unjoined:
            self.join()


def source(seed: int) -> str:
    return _Writer(seed).write()


def _sparse(k: Kit) -> torch.Tensor:
    """One entry in sixteen is 1 or -1."""
    signs = torch.randint(0, 2, (SIZE, SIZE), generator=k.generator) * 2 - 1
    kept = torch.randint(0, 16, (SIZE, SIZE), generator=k.generator) == 0
    return (signs * kept).float().to("cuda").requires_grad_()


def _build(seed: int, k: Kit) -> Any:
    writer = _Writer(seed)
    text = writer.write()
    streams = [k.stream() for _ in range(writer.streams)]
    weights = [_sparse(k) for _ in range(writer.weights)]
    scope: dict[str, Any] = {"torch": torch, "on": torch.cuda.stream, "fork": fork, "join": join, "sleep": k.sleep}
    scope |= {
        "checkpoint": checkpoint,
        **{f"s{i}": stream for i, stream in enumerate(streams, 1)},
        **{f"w{i}": weight for i, weight in enumerate(weights)},
    }
    exec(compile(text, f"<train_random_{seed:02}>", "exec"), scope)
    forward = k.compile(scope["forward"])
    scale = 2.0**-9 if writer.autocast else 1.0

    def step(x, cache):
        x = x.detach().requires_grad_()
        loss = forward(x, cache)
        loss.backward()
        gradients = [None if t.grad is None else t.grad * scale for t in (x, *weights)]
        for t in (x, *weights):
            t.grad = None
        return loss.detach() * scale, gradients

    return step


def _register() -> None:
    fields: dict[str, Any] = {"frames": True, "ordered": True, "group": "random_training"}
    for seed in range(COUNT):
        name, build = f"train_random_{seed:02}", functools.partial(_build, seed)
        tolerance = 0.02 if _Writer(seed).autocast else 0.0
        PROGRAMS.append(Program(name, "drawn at random", build, matrices(2), tolerance=tolerance, **fields))


_register()
