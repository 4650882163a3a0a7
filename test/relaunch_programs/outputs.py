"""Outputs: how long they live, what they alias, what they are fed to."""

import gc

import torch
from torch import nn

from relaunch_programs._program import Kit, program


def mix(x: torch.Tensor) -> torch.Tensor:
    """A matrix product and pointwise work, which keeps numbers of the order of one."""
    return torch.tanh(x @ x.t() / 8) + x


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@program("an output is overwritten by a later call (#152887)", launches=6)
def outputs_stay(k: Kit) -> None:
    f = k.compile(lambda x: (mix(x), x.sum(0), x * 2))
    held = []
    for _ in k.steps(14):
        held.append(f(k.randn(64, 64)))
        if len(held) >= 6:
            k.see("output of five calls ago", held[-6])
    k.see("all outputs", held)


@program("an output dies with the module that made it")
def outputs_outlive_their_module(k: Kit) -> None:
    model = k.module(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)))
    f = k.compile(model)
    with torch.no_grad():
        held = [f(k.randn(16, 64)) for _ in k.steps()]
    del f, model
    gc.collect()
    for _ in k.steps(4):
        k.see("after deletion", held)
    torch._dynamo.reset()
    gc.collect()
    for _ in k.steps(4):
        k.see("after reset", held)


@program("f(f(x)): the output of a call is the next one's input (#160281)", launches=10)
def function_of_itself(k: Kit) -> None:
    f = k.compile(mix)
    for _ in k.steps():
        x = k.randn(64, 64)
        y = f(f(x))
        k.see("f(f(x))", (y, f(f(f(y))), x))


@program("state that is carried from call to call is overwritten while it is read (mujoco)", launches=10)
def carried_state(k: Kit) -> None:
    def step(s):
        position, speed = s["position"], s["speed"]
        force = torch.tanh(position @ s["weight"])
        return {"position": position + 0.1 * speed, "speed": speed * 0.9 + force * 0.1, "weight": s["weight"]}

    f = k.compile(step)
    s = {"position": k.randn(32, 64), "speed": k.randn(32, 64), "weight": k.randn(64, 64) / 8}
    for _ in k.steps(16):
        s = f(s)
        k.see("state", s)


@program("states of several calls ago are inputs, and kept", launches=8)
def history(k: Kit) -> None:
    f = k.compile(lambda new, old: (torch.cos(new @ old.t() / 8) @ new / 8, new - old))
    states = [k.randn(48, 64) for _ in range(3)]
    for _ in k.steps(12):
        state, change = f(states[-1], states[-3])
        states.append(state)
        k.see("change", change)
    k.see("states", states)


@program("an output that is an input is given back as a copy, or not at all", launches=6)
def output_is_input(k: Kit) -> None:
    f = k.compile(lambda x: (x, x * 2, x.view(-1)))
    for _ in k.steps():
        x = k.randn(32, 32)
        same, double, flat = f(x)
        x.add_(1)
        k.see("after a write to the input", (same, double, flat))
        k.see("shared", (shares_storage(same, x), shares_storage(flat, x), shares_storage(double, x)))


@program("outputs that are views of one tensor come back as copies", launches=6)
def outputs_alias_each_other(k: Kit) -> None:
    def fn(x):
        y = torch.tanh(x @ x)
        return y, y.t(), y[1:, ::2], y.view(-1)[7:]

    f = k.compile(fn)
    for _ in k.steps():
        y, transposed, part, tail = f(k.randn(32, 32))
        y.mul_(3)
        part.add_(1)
        k.see("after writes through two of them", (y, transposed, part, tail))
        k.see("shared", [shares_storage(y, v) for v in (transposed, part, tail)])


@program("outputs that are views of an input come back as copies", launches=6)
def outputs_alias_an_input(k: Kit) -> None:
    f = k.compile(lambda x, y: (x[1:], x.t(), x.view(2, -1)[1], (x + y).sum(1)))
    for _ in k.steps():
        x, y = k.randn(32, 64), k.randn(32, 64)
        rows, transposed, half, total = f(x, y)
        rows.zero_()
        k.see("after a write through an output", (x, transposed, half, total))


@program("the same tensor is returned twice", launches=6)
def output_twice(k: Kit) -> None:
    def fn(x):
        y = x.exp().cumsum(0)
        return y, x + 1, y

    f = k.compile(fn)
    for _ in k.steps():
        a, b, c = f(k.randn(33, 65))
        a.neg_()
        k.see("outputs", (a, b, c, shares_storage(a, c)))


@program("an output that the caller writes to changes the next call", launches=6)
def caller_writes_outputs(k: Kit) -> None:
    f = k.compile(lambda x: (x.softmax(-1), x.sum()))
    x = k.randn(64, 96)
    for _ in k.steps():
        p, total = f(x)
        k.see("outputs", (p, total))
        p.fill_(float("nan"))
        total.zero_()


@program("only a view of an output is kept")
def view_of_an_output_is_kept(k: Kit) -> None:
    f = k.compile(lambda x: mix(x))
    kept = []
    for _ in k.steps(12):
        kept.append(f(k.randn(64, 64))[3:5])
    k.see("views", kept)


@program("values that are no GPU tensors among the outputs", launches=6)
def outputs_of_other_kinds(k: Kit) -> None:
    f = k.compile(lambda x, n: {"y": x * n, "none": None, "n": n + 1, "shape": tuple(x.shape), "text": "a"})
    for i in k.steps(10):
        k.see("outputs", f(k.randn(17, 5), 3 if i < 8 else 4))


@program("outputs without inputs, made of constants", launches=6)
def outputs_of_nothing(k: Kit) -> None:
    table = k.randn(16, 16)
    f = k.compile(lambda: (torch.arange(64, device=k.device).float().cos(), table.t() @ table, torch.ones(3)))
    for _ in k.steps():
        k.see("outputs", f())


@program("a constant of the graph is given away as an output, and then written to")
def constant_output(k: Kit) -> None:
    f = k.compile(lambda x: (x + 1, torch.tensor([1.0, 2.0, 3.0], device=k.device)))
    for _ in k.steps():
        y, constant = f(k.randn(3))
        k.see("outputs", (y, constant))
        constant.zero_()


@program(
    "an output of a larger scratch block's address: regions of different sizes overlap (design, trap 2)", launches=6
)
def outputs_after_large_scratch(k: Kit) -> None:
    def fn(x):
        big = torch.cat([x @ x.t(), x @ x.t()], 1)  # 64 times the output
        small = big.sum(1)
        again = (small[:, None] * x).softmax(0) @ x.t()
        return small, again.amax(1), again[:2].clone()

    f = k.compile(fn)
    for _ in k.steps():
        k.see("outputs", f(k.randn(256, 64)))


@program("operators that Inductor leaves to ATen allocate their outputs themselves", launches=6)
def fallback_operators(k: Kit) -> None:
    def fn(x, index):
        values, order = x.sort(1)
        top, where = x.topk(5, 1)
        gathered = torch.zeros_like(x).scatter_add(1, index, x)
        return values, top, gathered, x.cumsum(1), torch.linalg.vector_norm(x, dim=1), x.gather(1, order)

    f = k.compile(fn)
    for _ in k.steps():
        k.see("outputs", f(k.randn(33, 70), k.randint(70, 33, 70)))


@program("memory is filled, copied and reduced: memset and memcpy nodes", launches=6)
def fills_and_copies(k: Kit) -> None:
    def fn(x):
        y = torch.zeros(3, *x.shape, device=x.device)
        y[1].copy_(x)
        y[2] += x.flip(0)
        return y, torch.full_like(x, 2.5), x.sum(), x.clone(), torch.zeros_like(x)

    f = k.compile(fn)
    for _ in k.steps():
        k.see("outputs", f(k.randn(1000, 33)))


@program("a reduction in several steps keeps semaphores that the graph must reset", launches=6, loose=4)
def large_reduction(k: Kit) -> None:
    f = k.compile(lambda x: (x.sum(), x.amax(), x.std(), x @ x.t(), torch.linalg.norm(x)))
    for _ in k.steps():
        k.see("outputs", f(k.randn(8, 1 << 18) / 512))
