"""Regions of many sizes, whose code runs as steps of C: no size comes often enough for a graph.

Dynamo may compile a program more than once, and two calls of each code show its steps.
"""

import threading
from collections.abc import Iterator

import torch
from torch import nn, Tensor
from torch.nn import functional as F

from relaunch_programs._program import Kit, program


SIZES = ((37, 300), (5, 64), (41, 7), (6, 1000), (3000, 33), (7, 7), (37, 300), (513, 65), (2, 2), (64, 4096), (5, 64))


def sizes(k: Kit, rounds: int = 2) -> Iterator[tuple[int, int]]:
    for size in SIZES * rounds:
        k.churn()
        yield size


@program("pointwise code of two sizes that vary", steps=10)
def pointwise(k: Kit) -> None:
    f = k.compile(lambda x, y: (x.sin() * y + 1, x.shape[0] + x.shape[1]), dynamic=True)
    for n, m in sizes(k):
        k.see(f"{n} x {m}", f(k.randn(n, m), k.randn(m)))


@program("one size varies first, then both", steps=8)
def one_then_both(k: Kit) -> None:
    f = k.compile(lambda x: x.cos().sum(1), dynamic=True)
    for n in (4, 9, 30, 17, 64):
        k.see(f"{n}", f(k.randn(n, 32)))
    for n, m in sizes(k, 1):
        k.see(f"{n} x {m}", f(k.randn(n, m)))


@program("norms and softmax, whose rows are reduced in one block or in a loop", steps=10, loose=4)
def norms(k: Kit) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.layer_norm(x + y, x.shape[-1:]).softmax(-1), (x * y).amax(1)

    f = k.compile(fn, dynamic=True)
    for n, m in sizes(k):
        k.see(f"{n} x {m}", f(k.randn(n, m), k.randn(n, m)))


@program("parts of a concatenation begin where a size says", steps=10)
def concatenation(k: Kit) -> None:
    f = k.compile(lambda x, y: torch.cat([x * 2, y.sin(), x.exp()]).cos(), dynamic=True)
    for n, m in sizes(k):
        k.see(f"{n} x {m}", f(k.randn(n, m), k.randn(2 * n + 1, m)))


@program("a result is read as a whole and in parts", steps=10)
def parts_of_a_result(k: Kit) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        whole = torch.cat([x.cos(), y.sin()], 1)
        return whole, whole[:, : x.shape[1]] + 1, whole[1:]

    f = k.compile(fn, dynamic=True)
    for n, m in sizes(k):
        k.see(f"{n} x {m}", f(k.randn(n, m), k.randn(n, m)))


@program("a transposition with a grid of two dimensions", steps=10)
def transposition(k: Kit) -> None:
    f = k.compile(lambda x: (x.t().contiguous() * 2, x.sum(0)), dynamic=True)
    for n, m in sizes(k):
        k.see(f"{n} x {m}", f(k.randn(n, m)))


@program("memory is used again at every size, and never while it is in use", steps=10, loose=16)
def chain_of_sums(k: Kit) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(6):
            x = (x - x.mean(0)) / (1 + y.abs().sum(1, keepdim=True))
            y = y * x.amax(0) + 1
            y = y / y.abs().amax()
        return x + y

    f = k.compile(fn, dynamic=True)
    for n, m in sizes(k):
        k.see(f"{n} x {m}", f(k.randn(n, m), k.randn(n, m)))


@program("an input is written in place", steps=8)
def in_place(k: Kit) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(y.sum())
        return x.sum(0)

    f = k.compile(fn, dynamic=True)
    for n, m in sizes(k):
        x = k.randn(n, m)
        k.see(f"{n} x {m}", (f(x, k.randn(m)), x))


@program("training of pointwise code and norms", steps=10, loose=8)
def training(k: Kit) -> None:
    scale = k.randn(1, grad=True)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return (F.layer_norm(x.sin() * scale + y, x.shape[-1:]).softmax(0) * x.shape[0]).tanh()

    f = k.compile(loss, dynamic=True)
    for n, m in sizes(k):
        x, y = k.randn(n, m, grad=True), k.randn(n, m)
        f(x, y).sum().backward()
        k.see(f"{n} x {m}", (x.grad, scale.grad))
        scale.grad = None


@program("backwards of several sizes are alive", steps=10, loose=8)
def backwards_alive(k: Kit) -> None:
    f = k.compile(lambda x: (x.sin() * x).softmax(-1).cumsum(0), dynamic=True)
    for round in range(3):
        inputs = [k.randn(n, m, grad=True) for n, m in SIZES]
        made = [f(x).square().sum() for x in inputs]
        for value in made if round % 2 else reversed(made):
            value.backward()
        k.see(f"round {round}", [x.grad for x in inputs])


@program("outputs of a size live while other sizes run", steps=10)
def outputs_live(k: Kit) -> None:
    f = k.compile(lambda x: (x * 2, x.sum(0), x[1:] + 1), dynamic=True)
    held = [f(k.randn(n, m)) for n, m in sizes(k)]
    k.see("all", held)


@program("an output of one size is the input of another", steps=10)
def chained(k: Kit) -> None:
    f = k.compile(lambda x: x[: x.shape[0] - 1].cos() + 1, dynamic=True)
    for _ in range(3):
        x = k.randn(24, 16)
        for _ in range(10):
            x = f(x)
        k.see("end", x)


@program("parameters of a module, and a size that a module has fixed", steps=10, loose=4)
def parameters(k: Kit) -> None:
    model = k.module(nn.Sequential(nn.LayerNorm(48), nn.GELU(), nn.LayerNorm(48))).eval()
    f = k.compile(lambda x: model(x) * x.shape[0], dynamic=True)
    with torch.no_grad():
        for n, m in sizes(k):
            k.see(f"{n} x {m}", f(k.randn(n, 1 + m % 7, 48)))


@program("inputs that are aligned to four bytes alone", steps=4)
def misaligned_steps(k: Kit) -> None:
    f = k.compile(lambda x: (x.sin() + 1, x.sum(0)), dynamic=True)
    for i, (n, m) in enumerate(sizes(k)):
        x = k.randn(n * m + 3)
        k.see(f"{n} x {m}", f(x[i % 3 :][: n * m].view(n, m)))


@program("an integer that counts up beside sizes that vary", steps=10)
def number_and_sizes(k: Kit) -> None:
    f = k.compile(lambda x, i: x * i + i, dynamic=True)
    for i, (n, m) in enumerate(sizes(k), start=2):
        k.see(f"{i}", f(k.randn(n, m), i))


@program("scans and sums whose blocks depend on the size", steps=8, loose=4)
def scans(k: Kit) -> None:
    f = k.compile(lambda x: (x.cumsum(1), x.sum(), x.argmax(1), x.var(0)), dynamic=True)
    for n, m in sizes(k):
        k.see(f"{n} x {m}", f(k.randn(n, m)))


@program("half precision, and sums in single precision", steps=10, loose=4)
def half_precision_steps(k: Kit) -> None:
    f = k.compile(lambda x: (F.gelu(x) + 1, x.float().pow(2).mean(-1).rsqrt()), dynamic=True)
    for n, m in sizes(k):
        k.see(f"{n} x {m}", f(k.randn(n, m, dtype=torch.bfloat16)))


@program("sizes on both sides of a bound of the code", steps=5)
def bounded_sizes(k: Kit) -> None:
    f = k.compile(lambda x: F.pad(x, (0, 0, 0, max(16 - x.shape[0], 0))).cos(), dynamic=True)
    for n in (5, 9, 40, 12, 64, 3, 17, 15, 33, 8, 100, 5, 40):
        k.churn()
        k.see(f"{n}", f(k.randn(n, 8)))


@program("dropout draws what it draws without graphs", random=True, steps=2)
def dropout_steps(k: Kit) -> None:
    f = k.compile(lambda x: F.dropout(x, 0.3) + 1, dynamic=True)
    for i, (n, m) in enumerate(sizes(k)):
        k.seed(i)
        k.see(f"{n} x {m}", f(k.randn(n, m)))


@program("a library is called in between, at sizes that vary", steps=2)
def library_between(k: Kit) -> None:
    f = k.compile(lambda x: (x.sin() @ x.t()).softmax(-1), dynamic=True)
    for n, m in sizes(k):
        k.see(f"{n} x {m}", f(k.randn(min(n, 300), m)))


class Layers(nn.Module):
    def __init__(self, width: int, layers: int = 3) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(width, 2 * width) for _ in range(layers)])
        self.outer = nn.ModuleList([nn.Linear(2 * width, width, bias=False) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for inner, outer in zip(self.inner, self.outer):
            x = x + outer(inner(x).relu())
            x = x + (x @ x.transpose(1, 2)).softmax(-1) @ x
        return torch.baddbmm(x, x, outer.weight[:, : x.shape[-1]].expand(x.shape[0], -1, -1), beta=0.5, alpha=0.25)


BATCHES = ((2, 7), (3, 16), (5, 33), (2, 7), (7, 64), (3, 16), (5, 33), (2, 100))


@program("products of all layers are launched from few captures, at any size", steps=10, library_calls=150, loose=4)
def products(k: Kit) -> None:
    for width, dtype in ((64, torch.float32), (48, torch.bfloat16), (37, torch.float32)):
        f = k.compile(k.module(Layers(width), dtype).eval(), dynamic=True)
        with torch.no_grad():
            for n, m in BATCHES * 2:
                k.churn()
                k.see(f"{width}: {n} x {m}", f(k.randn(n, m, width).to(dtype)))


@program("products of training, whose operands are transposed", steps=10, library_calls=150, loose=8)
def products_training(k: Kit) -> None:
    module = k.module(Layers(64))
    f = k.compile(module, dynamic=True)
    for n, m in BATCHES * 2:
        k.churn()
        module.zero_grad()
        f(k.randn(n, m, 64)).square().mean().backward()
        k.see(f"{n} x {m}", [p.grad for p in module.parameters()])


@program("products whose operands share memory, or are less aligned than before", steps=5, library_calls=5, loose=4)
def products_of_parts(k: Kit) -> None:
    f = k.compile(lambda x, y: (x @ x.t(), x @ y, x.t() @ x), dynamic=True)
    for n in (16, 33, 64, 16, 64, 33, 16):
        for skip in (0, 1, 4):
            k.churn()
            whole = k.randn(n * 40 + skip)[skip:].view(n, 40)
            k.see(f"{n}, {skip}", f(whole, k.randn(40 * n + skip)[skip:].view(40, n)))
            k.see(f"{n}, {skip}, transposed", f(whole, whole.t()))


@program("a mode of the library changes between calls", steps=5, library_calls=10, loose=16, gpu_only=True)
def products_of_modes(k: Kit) -> None:
    f = k.compile(lambda x, y: (x.sin() @ y).cos() @ y, dynamic=True)
    settings = torch.backends.cuda.matmul
    before = settings.allow_tf32
    try:
        for precise in (True, True, False, True, False, True):
            settings.allow_tf32 = not precise
            for n in (64, 128, 256):
                k.churn()
                k.see(f"{n}, {precise}", f(k.randn(n, 256), k.randn(256, 256)))
    finally:
        settings.allow_tf32 = before


@program(
    "products on streams, in threads and in a pool of the user's", steps=5, library_calls=10, loose=4, gpu_only=True
)
def products_elsewhere(k: Kit) -> None:
    f = k.compile(k.module(Layers(64)).eval(), dynamic=True)
    pool = torch.cuda.MemPool()
    found: list[Tensor] = []

    def other(x: Tensor) -> None:
        with torch.no_grad():
            found.append(f(x))

    with torch.no_grad():
        for n, m in BATCHES * 2:
            k.churn()
            x = k.randn(n, m, 64)
            k.see("here", f(x))
            with k.on(k.stream()):
                k.see("on a stream", f(x))
            with torch.cuda.use_mem_pool(pool):
                k.see("in a pool", f(x))
            k.synchronize()
            thread = threading.Thread(target=other, args=(x,))
            thread.start()
            thread.join()
            k.synchronize()
            k.see("in a thread", found.pop())


class Attention(nn.Module):
    def __init__(self, joint: bool) -> None:
        super().__init__()
        self.joint = joint
        self.all, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            q, k, v = self.all(x).split(64, 2)
            if not self.joint:
                q, k, v = q.sin(), k.cos(), v * 2
            q, k, v = (y.view(*y.shape[:2], 4, 16).transpose(1, 2) for y in (q, k, v))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.joint).transpose(1, 2).flatten(2))
        return x


@program("attention of any length, of parts of one product and of others", steps=10, library_calls=60, loose=16)
def attention_steps(k: Kit) -> None:
    for joint, dtype in ((True, torch.float32), (False, torch.bfloat16), (False, torch.float32)):
        module = k.module(Attention(joint), dtype)
        f = k.compile(module, dynamic=True)
        for n, m in BATCHES * 2:
            k.churn()
            module.zero_grad()
            y = f(k.randn(n, m, 64).to(dtype))
            y.float().square().mean().backward()
            k.see(f"{joint} {dtype}: {n} x {m}", [y, *[p.grad for p in module.parameters()]])
