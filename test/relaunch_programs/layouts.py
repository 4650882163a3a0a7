"""Layouts: dtypes, strides, alignment, sizes, and inputs that are no GPU tensors."""

import torch

from relaunch_programs._program import Kit, program


def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """The same values, `by` elements after the start of an allocation."""
    base = x.new_empty(x.numel() + by)
    return base[by:].view(x.shape).copy_(x)


@program("strides of inputs that are not contiguous", launches=6)
def not_contiguous(k: Kit) -> None:
    f = k.compile(lambda a, b, c: (a @ b.t(), a * 2, b + 1, c.sum(-1)))
    for _ in k.steps():
        base = k.randn(64, 128)
        k.see("outputs", f(base[:, ::2], k.randn(64, 48).t(), k.randn(8, 6, 4).permute(2, 0, 1)))


@program("views of inputs start inside an allocation", launches=6)
def views_as_inputs(k: Kit) -> None:
    f = k.compile(lambda x, y: (x @ y, x.cos() + y.t().sum()))
    for _ in k.steps():
        base = k.randn(4, 64, 64)
        k.see("outputs", f(base[1], base[3]))


@program("inputs of one storage, and the very same input twice", launches=3)
def aliased_inputs(k: Kit) -> None:
    f = k.compile(lambda x, y: x * 2 + y @ y)
    for _ in k.steps():
        x = k.randn(64, 64)
        k.see("the same", f(x, x))
        k.see("transposed", f(x, x.t()))
        pair = k.randn(96, 64)
        k.see("overlapping", f(pair[:64], pair[32:]))
        k.see("two", f(x, k.randn(64, 64)))


@program("an input that is not aligned is read as if it were", launches=6)
def misaligned(k: Kit) -> None:
    f = k.compile(lambda x, y: (x + y, (x * y).sum(1), x @ y.t()))
    for _ in k.steps():
        k.see("outputs", f(shifted(k.randn(64, 65), 1), k.randn(64, 65)))


@program("alignment that changes from call to call meets kernels made for the other", launches=4)
def alignment_changes(k: Kit) -> None:
    f = k.compile(lambda x: (x.exp(), x.view(-1)[::3].cumsum(0)))
    for i in k.steps(20):
        x = k.randn(64, 64)
        k.see("outputs", f(shifted(x, i % 5) if i % 2 else x))


@program("memory format", launches=6, loose=10)
def channels_last(k: Kit) -> None:
    conv = k.module(torch.nn.Conv2d(4, 8, 3)).to(memory_format=torch.channels_last)
    f = k.compile(lambda x: conv(x).relu())
    with torch.no_grad():
        for _ in k.steps():
            y = f(k.randn(2, 4, 16, 16).contiguous(memory_format=torch.channels_last))
            k.see("output", (y, y.is_contiguous(memory_format=torch.channels_last)))


@program("inputs with stride 0", launches=6)
def expanded(k: Kit) -> None:
    f = k.compile(lambda x, y: (x + y, (x * y).sum(0)))
    for _ in k.steps():
        k.see("outputs", f(k.randn(1, 64).expand(32, 64), k.randn(32, 1).expand(32, 64)))


@program("tensors without elements have no address", launches=6)
def empty_tensors(k: Kit) -> None:
    f = k.compile(lambda e, x: (e * 2, torch.cat([e, x]), x.sum(0), x[:0], e.sum()))
    for _ in k.steps():
        k.see("outputs", f(k.randn(0, 16), k.randn(5, 16)))


@program("everything is empty: a graph without nodes", launches=0, refusals=True)
def only_empty_tensors(k: Kit) -> None:
    f = k.compile(lambda e: (e * 2, e.t()))
    for _ in k.steps():
        k.see("outputs", f(k.randn(0, 16)))


@program("tensors without dimensions", launches=6)
def zero_dimensions(k: Kit) -> None:
    f = k.compile(lambda a, b, x: (a * b, x * a + b, x.sum() * a))
    for _ in k.steps():
        k.see("outputs", f(k.randn(), k.randn(), k.randn(33)))


@program("complex numbers", launches=6, refusals=True)
def complex_numbers(k: Kit) -> None:
    f = k.compile(lambda x, y: (x * y, x.abs(), torch.view_as_real(x + y), (x @ y.t()).real))
    for _ in k.steps():
        k.see("outputs", f(*(torch.complex(k.randn(32, 32), k.randn(32, 32)) for _ in range(2))))


@program("eight bit floating point", launches=6, loose=8)
def float8(k: Kit) -> None:
    def fn(x, y):
        wide = x.to(torch.float32) * y
        return wide.clamp(-100, 100).to(torch.float8_e4m3fn), wide.sum(0), x

    f = k.compile(fn)
    for _ in k.steps():
        k.see("outputs", f(k.randn(32, 64, dtype=torch.float8_e4m3fn), k.randn(32, 64)))


@program("a product of eight bit matrices: a library call with scales", launches=6, loose=8, gpu_only=True)
def float8_product(k: Kit) -> None:
    def fn(x, y, scale):
        return torch._scaled_mm(x, y.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

    f = k.compile(fn)
    for _ in k.steps():
        x, y = (k.randn(64, 128, dtype=torch.float8_e4m3fn) for _ in range(2))
        k.see("output", f(x, y, k.randn().abs()))


@program("a sparse output is no strided memory (upstream skips such graphs)", launches=0, refusals=True)
def sparse_output(k: Kit) -> None:
    def fn(x):
        y = x.relu()
        return y.to_sparse(), y * 2

    f = k.compile(fn)
    for _ in k.steps():
        sparse, y = f(k.randn(16, 16))
        k.see("outputs", (sparse.to_dense(), y))


@program("integers, booleans and double precision", launches=6)
def other_dtypes(k: Kit) -> None:
    def fn(i, b, h, d):
        return i * 3 - i.to(torch.int32), b & (i > 2), h.float() + 1, d.cumsum(0), (h > 0).sum(), b.to(torch.uint8)

    f = k.compile(fn)
    for _ in k.steps():
        i, b = k.randint(9, 40, 3), k.randint(2, 40, 3).bool()
        k.see("outputs", f(i, b, k.randn(40, 3, dtype=torch.float16), k.randn(40, 3, dtype=torch.float64)))


@program("sizes that are no multiple of anything", launches=6)
def odd_sizes(k: Kit) -> None:
    f = k.compile(lambda x, w: (x @ w, x.softmax(-1), w.t().contiguous(), x[1:, 1:] * 3))
    for _ in k.steps():
        k.see("outputs", f(k.randn(37, 53), k.randn(53, 11)))


@program("a tensor of the host with one number among the inputs (XLNet lost 413 kernels)", launches=0, refusals=True)
def host_scalar(k: Kit) -> None:
    f = k.compile(lambda x, s: (x * s + 1, (x @ x.t()).relu()))
    for i in k.steps():
        k.see("outputs", f(k.randn(64, 64), torch.tensor(0.5 * i)))


@program("a host tensor is read and written in the middle of a region", launches=0, refusals=True)
def host_tensor(k: Kit) -> None:
    def fn(x, h):
        y = x.sin()
        host = (y.cpu() + h).cos()
        return y * 2, host, host.to(x.device) + y

    f = k.compile(fn)
    for _ in k.steps():
        k.see("outputs", f(k.randn(32, 32), torch.randn(32, 32, generator=k.generator)))


@program("Python numbers that change from call to call are baked in", launches=0)
def python_numbers(k: Kit) -> None:
    f = k.compile(lambda x, n, a, flag: (x * n + a, x.relu() if flag else x.sum(0)))
    for i in k.steps(16):
        k.see("outputs", f(k.randn(32, 32), i % 4 + 2, 0.25 * i, i % 3 == 0))


@program("a Python float that changes on every call", launches=0)
def learning_rate(k: Kit) -> None:
    f = k.compile(lambda p, g, rate: p - rate * g.sign() * p.abs())
    p = k.randn(64, 64)
    for i in k.steps(16):
        p = f(p, k.randn(64, 64), 0.5 / (i + 1))
        k.see("p", p)


@program("0.0 and -0.0 share a graph, and a NaN never finds its own", launches=2, refusals=True)
def signed_zeros(k: Kit) -> None:
    f, g = (k.compile(lambda x, s: (x / s, x * s)) for _ in range(2))
    for i in k.steps(24):
        value = [0.0, -0.0, float("nan"), 2.0][i % 4]
        x = k.randn(64).abs() + 1
        k.see("host tensor", f(x, torch.tensor(value)))
        k.see("Python number", g(x, value))


@program("inputs in containers, and None", launches=6)
def containers(k: Kit) -> None:
    def fn(d, pair, nothing=None):
        x = d["x"] * (2 if nothing is None else nothing)
        return {"sum": x + pair[0] @ pair[1], "same": d["y"]}

    f = k.compile(fn)
    for i in k.steps(12):
        d = {"x": k.randn(32, 32), "y": k.randn(4)}
        k.see("outputs", f(d, (k.randn(32, 8), k.randn(8, 32)), None if i < 8 else k.randn(1)))


@program("inputs of 64 MiB: fresh ones are not copied, and scratch is as large", launches=3)
def large_inputs(k: Kit) -> None:
    f = k.compile(lambda x, y: ((x - y).abs().sum(1), x[:64] @ y[:64].t()))
    for _ in k.steps(5):
        rows = 4096 if k.gpu else 64
        shape = (rows, 4096)
        x, y = (k.randn(8, 1).expand(8, rows // 8).reshape(rows, 1) * k.randn(1, 4096) / 64 for _ in range(2))
        assert x.shape == shape
        k.see("outputs", f(x, y))
