"""Programs of two sizes, drawn at random: what Inductor makes Triton kernels of, at sizes that no capture has seen.

    scope = {"torch": torch}
    exec(drawn(random.Random(0)), scope)
    scope["fn"](x, y, v, u)             # [n, m], [n, m], [m] and [n]

Shapes are known as texts of n and m: operands are chosen that fit at any size.
"""

import random
from collections.abc import Callable
from typing import Any


Shape = tuple[str, ...]
NUMBERS = ("n", "m", "n + m", "n * m", "max(n, 7)", "min(m, 50)", "n // 3", "n % 5", "m - n", "min(max(n, 9), m)")


class _Drawing:
    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.lines = ["    n, m = x.shape"]
        self.shapes: dict[str, Shape] = {"x": ("n", "m"), "y": ("n", "m"), "v": ("m",), "u": ("n",)}

    def step(self) -> None:
        name = self.draw.choice(list(self.shapes)[-6:])
        shape = self.shapes[name]
        kind = self.draw.choice(STEPS if len(shape) == 2 else STEPS_OF_VECTORS)
        if (made := kind(self, name, shape)) is not None:
            text, shape = made
            new = f"t{len(self.lines)}"
            self.lines.append(f"    {new} = {text}")
            self.shapes[new] = shape

    def other(self, shape: Shape) -> str | None:
        return self.draw.choice([name for name, s in self.shapes.items() if s == shape] or [None])


def _unary(d: _Drawing, a: str, shape: Shape) -> Any:
    return f"torch.{d.draw.choice(('sin', 'relu', 'abs', 'tanh', 'sigmoid'))}({a})", shape


def _binary(d: _Drawing, a: str, shape: Shape) -> Any:
    return f"{a} {d.draw.choice('+-*')} {d.other(shape)}", shape


def _number(d: _Drawing, a: str, shape: Shape) -> Any:
    return f"{a} {d.draw.choice('+*')} ({d.draw.choice(NUMBERS)})", shape


def _flip(d: _Drawing, a: str, shape: Shape) -> Any:
    return f"{a}.flip(0)", shape


def _positions(d: _Drawing, a: str, shape: Shape) -> Any:
    return f"torch.arange({a}.shape[0], device={a}.device) * 2.5", shape[:1]


def _rows(d: _Drawing, a: str, shape: Shape) -> Any:
    other = d.other(shape[1:])
    return other and (f"{a} * {other}", shape)


def _reduced(d: _Drawing, a: str, shape: Shape) -> Any:
    axis = d.draw.randrange(2)
    return f"{a}.{d.draw.choice(('sum', 'mean', 'amax'))}({axis})", (shape[1 - axis],)


def _along(d: _Drawing, a: str, shape: Shape) -> Any:
    return f"{d.draw.choice(('torch.softmax', 'torch.cumsum', 'torch.tril'))}({a}, {d.draw.randrange(2)})", shape


def _joined(d: _Drawing, a: str, shape: Shape) -> Any:
    axis, other = d.draw.randrange(2), d.other(shape)
    joined = list(shape)
    joined[axis] = f"(2 * {shape[axis]})"
    return f"torch.cat([{a}, {other}], {axis})", tuple(joined)


def _turned(d: _Drawing, a: str, shape: Shape) -> Any:
    return f"{a}.t(){d.draw.choice(('', '.contiguous()'))}", shape[::-1]


def _part(d: _Drawing, a: str, shape: Shape) -> Any:
    first, second = shape
    parts = (
        ("[1:]", (f"({first} - 1)", second)),
        ("[:, 1:]", (first, f"({second} - 1)")),
        (f"[: min(40, {a}.shape[0])]", (f"min(40, {first})", second)),
        (f"[: ({a}.shape[0] + 1) // 2]", (f"(({first} + 1) // 2)", second)),
    )
    text, part = d.draw.choice(parts)
    return f"{a}{text}", part


def _padded(d: _Drawing, a: str, shape: Shape) -> Any:
    text = f"torch.nn.functional.pad({a}, (1, 2, 0, max(45 - {a}.shape[0], 0)))"
    return text, (f"max({shape[0]}, 45)", f"({shape[1]} + 3)")


def _repeated(d: _Drawing, a: str, shape: Shape) -> Any:
    return f"{a}.repeat(2, 1)", (f"(2 * {shape[0]})", shape[1])


Step = Callable[[_Drawing, str, Shape], Any]  # -> (text, shape), or None where nothing fits
STEPS_OF_VECTORS: tuple[Step, ...] = (_unary, _binary, _number, _flip, _positions)
STEPS: tuple[Step, ...] = (*STEPS_OF_VECTORS, _binary, _rows, _reduced, _along, _joined, _turned, _part, _padded)
STEPS += (_repeated,)


def drawn(draw: random.Random, trains: bool = False) -> str:
    """Return the text of a function `fn(x, y, v, u)`. With `trains` it returns one tensor, else several values."""
    drawing = _Drawing(draw)
    if not trains and draw.random() < 0.2:
        drawing.lines.append("    x.mul_(1.5)")
    for _ in range(draw.randrange(3, 11)):
        drawing.step()
    made = list(drawing.shapes)[4:] or ["x.sin()"]
    if trains:
        results = " + ".join(["x.sin()", *[f"{name}.sum()" for name in made[-3:]]])
    else:
        outputs = draw.sample(made, min(len(made), draw.randrange(1, 5)))
        outputs += [text for text in ("n + m", outputs[0], f"{outputs[0]}[1:]") if draw.random() < 0.2]
        results = f"({', '.join(outputs)},)"
    return "\n".join(["def fn(x, y, v, u):", *drawing.lines, f"    return {results}", ""])
