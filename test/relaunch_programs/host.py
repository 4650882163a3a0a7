"""Host: small tensors in host memory that a region reads on the device, and what changes them between calls.

Where the region is rewritten, it keeps a copy on the device; each program would see an old value, or another one's
memory, if that were done carelessly.
"""

import torch

from relaunch_programs._program import Kit, program
from relaunch_programs.composition import in_threads, thread_kits


def table(n: int = 16) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32)


@program("a table that nobody writes", launches=6)
def host_table(k: Kit) -> None:
    held = table()
    f = k.compile(lambda x: (x * held.to(k.device)).sin())
    for _ in k.steps():
        k.see("output", f(k.randn(8, 16)))


@program("numpy writes to the tensor's memory: no version counter knows", launches=6)
def host_written_by_numpy(k: Kit) -> None:
    held = table()
    f = k.compile(lambda x: (x * held.to(k.device)).sin())
    for i in k.steps():
        held.numpy()[i % 16] = -i
        k.see("output", f(k.randn(8, 16)))


@program("the tensor is written in place, or replaced by an equal one, or by another one", launches=6)
def host_written_and_replaced(k: Kit) -> None:
    f = k.compile(lambda x, h: (x * h.to(k.device)).sin())
    held = table()
    for i in k.steps(12):
        if i % 3 == 1:
            held.mul_(-1)
        elif i % 3 == 2:
            held = held.clone() + (i % 2)
        k.see("output", f(k.randn(8, 16), held))


@program("zeros and NaNs differ by bits alone", launches=6)
def host_bits(k: Kit) -> None:
    f = k.compile(lambda x, h: (torch.copysign(x, h.to(k.device)), x / h.to(k.device)))
    values = [0.0, -0.0, float("nan"), 0.0, -0.0, -0.0, 1.0, 0.0]
    for i in k.steps():
        k.see("outputs", f(k.randn(16).abs() + 1, torch.full((16,), values[i])))


@program("the copy is a result, and the caller writes to it", launches=6)
def host_copy_is_a_result(k: Kit) -> None:
    def fn(x, h):
        y = h.to(k.device, copy=True)
        return x * y, y, y.view(4, 4)

    f = k.compile(fn)
    held = table()
    results = []
    for _ in k.steps():
        product, y, view = f(k.randn(16), held)
        view.add_(100)
        results.append((product, y, view))
    k.see("all results", results)


@program("the region writes to its copy", launches=6)
def host_copy_is_written(k: Kit) -> None:
    def fn(x, h):
        y = h.to(k.device, copy=True)
        before = x * y
        y.add_(x).mul_(2)
        return before, y.sin()

    f = k.compile(fn)
    held = table()
    for _ in k.steps():
        k.see("results", f(k.randn(16), held))
    k.see("the table", held)


@program("the host tensor is a result, too: it is the caller's own", launches=6)
def host_tensor_is_a_result(k: Kit) -> None:
    f = k.compile(lambda x, h: (h, x * h.to(k.device), h.view(4, 4)))
    for i in k.steps():
        held = table() + i
        same, product, view = f(k.randn(16), held)
        k.see("results", (same, product, view, same is held, same.device.type, view.device.type))
        same.zero_()
        k.see("written", (held, view))


@program("the region writes to the host tensor", launches=0, refusals=True)
def host_tensor_is_written(k: Kit) -> None:
    def fn(x, h):
        y = x * h.to(k.device)
        h.add_(1)
        return y, x * h.to(k.device)

    f = k.compile(fn)
    held = table()
    for _ in k.steps():
        k.see("results", (f(k.randn(16), held), held))


@program("a scalar that is another one at each call", launches=6)
def host_scalar_changes(k: Kit) -> None:
    f = k.compile(lambda x, s, n: (x * s, x + n, torch.where(x > 0, x, s)))
    for i in k.steps(20):
        k.see("outputs", f(k.randn(64), torch.tensor(0.1 * i), torch.tensor(i)))


@program("scalars of other types than what they meet", launches=6, loose=8)
def host_scalar_types(k: Kit) -> None:
    f = k.compile(lambda x, d, b, i: (x * d, x + b, x**i, (x * d).dtype))
    for n in k.steps():
        double, flag = torch.tensor(1 / (n + 3), dtype=torch.float64), torch.tensor(n % 2 == 0)
        k.see("outputs", f(k.randn(64, dtype=torch.bfloat16), double, flag, torch.tensor(n % 3, dtype=torch.int32)))


@program("indices in host memory, negative ones, and those of an assignment", launches=6)
def host_indices(k: Kit) -> None:
    def fn(x, rows, columns):
        y = x.index_put((columns,), x.sum(0)[columns].unsqueeze(1), accumulate=True)
        return (x @ x)[rows].sin(), y.cos(), x[torch.tensor([2, 0, 1])]

    f = k.compile(fn)
    for i in k.steps():
        rows, columns = torch.tensor([i, -1, 3 - i]), torch.tensor([(i + 1) % 16, 0, -2])
        k.see("outputs", f(k.randn(16, 16), rows, columns))


@program("indices are saved for the backward, and other ones come before it", launches=10)
def host_indices_in_training(k: Kit) -> None:
    w = k.randn(16, 16, grad=True)
    f = k.compile(lambda x, rows: ((x @ w)[rows].sin() * rows.to(k.device).unsqueeze(1)).sum())
    for i in k.steps():
        losses = [f(k.randn(16, 16), torch.tensor([i, 2 * i % 16, 5])), f(k.randn(16, 16), torch.tensor([1, 1, i]))]
        for loss in losses[:: 1 if i % 2 else -1]:
            loss.backward()
        k.see("loss, gradient", (losses, w.grad))
        w.grad = None


@program("what the host computes is saved for the backward, which may use its memory again", launches=6, refusals=True)
def host_value_in_training(k: Kit) -> None:
    def fn(x, h):
        scale = h.exp()
        return (x * scale.to(k.device)).sin().sum(0), scale * 2

    f = k.compile(fn)
    for i in k.steps():
        x = k.randn(8, 16, grad=True)
        y, doubled = f(x, table() * 0.01 * (i // 3))
        y.sum().backward()
        k.see("results, gradient", (y, doubled, x.grad))


@program("memory with gaps, a reversed one, a transposed one, an expanded one", launches=0, refusals=True)
def host_layouts(k: Kit) -> None:
    f = k.compile(lambda x, h: (x * h.to(k.device)).sin())
    base = torch.randn(16, 32, generator=k.generator)
    for i in k.steps():
        base.add_(i)
        for h in (base[:, ::2], base[:, :16].t(), base[:1, :16].expand(16, 16), base[:, 16:].contiguous().t()):
            k.see("output", f(k.randn(16, 16), h))


@program("a table larger than what is kept", launches=0, refusals=True)
def host_table_is_large(k: Kit) -> None:
    f = k.compile(lambda x, h: (x.sum() * h.to(k.device)).sin())
    held = torch.randn(1 << 19, generator=k.generator)
    for i in k.steps():
        held[i] = i
        k.see("output", f(k.randn(16), held)[:64])


@program("tables of several sizes, one graph for each", launches=12)
def host_table_sizes(k: Kit) -> None:
    f = k.compile(lambda x, h: (x * h.to(k.device)).sin(), dynamic=True)
    for i in k.steps(24):
        n = (16, 24, 40)[i % 3]
        k.see("output", f(k.randn(4, n), table(n) + i // 6))


@program("a tensor goes to the host and comes back in another shape", launches=6)
def round_trip(k: Kit) -> None:
    def fn(x):
        sums = (x @ x).sum(0).cpu()
        back = sums.view(4, 4).t().to(k.device, copy=True)
        y = x * 2 + back.reshape(16)
        back.add_(1)
        return y, sums, back

    f = k.compile(fn)
    for _ in k.steps():
        y, sums, back = f(k.randn(16, 16))
        sums.add_(1)
        k.see("results", (y, sums, back))


@program("a buffer of the device is filled from host memory", launches=6)
def host_fills_a_buffer(k: Kit) -> None:
    buffer = k.randn(16)

    def fn(x, h):
        buffer.copy_(h)
        return x * buffer

    f = k.compile(fn)
    for i in k.steps():
        k.see("results", (f(k.randn(16), table() + i), buffer))


@program("the device is still writing to the host tensor when the call comes", launches=6)
def host_tensor_is_being_written(k: Kit) -> None:
    f = k.compile(lambda x, h: (x * h.to(k.device)).sin())
    held = torch.empty(16, pin_memory=k.gpu)
    for i in k.steps():
        source = k.randn(16) + i
        if k.gpu:
            torch.cuda._sleep(1_000_000)
        held.copy_(source, non_blocking=True)
        k.see("output", f(k.randn(8, 16), held))
        k.synchronize()


@program("streams and threads take turns, with tables of their own", launches=12)
def host_tables_on_streams(k: Kit) -> None:
    f = k.compile(lambda x, h: (x @ x * h.to(k.device)).sin())
    streams = [k.stream() for _ in range(6)]
    for i in k.steps(24):
        with k.on(streams[i % 6]):
            y = f(k.randn(16, 16), table() + i // 4)
        k.see("output", y)
    kits = thread_kits(k, 2)

    def body(mine: Kit, by: int) -> None:
        for i in mine.steps():
            mine.see("output", f(mine.randn(16, 16), table() * by + i // 3))

    in_threads(k, *[lambda mine=mine, by=by: body(mine, by) for by, mine in enumerate(kits)])
    for mine in kits:
        k.see("a thread", [value for _, value in mine.seen])
