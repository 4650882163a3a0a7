"""What Inductor splits off when it compiles the code."""

from typing import Any

import torch

from outside_programs._program import program


DATA = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}


while_loop_ = torch._higher_order_ops.while_loop


def positive(i: Any, a: Any) -> Any:
    return i > 0


def doubled(i: Any, a: Any) -> Any:
    return i - 1, a * 2


def whole(x: Any, w: Any, *rest: Any) -> Any:
    y = (x @ w).sin()
    return (y @ w).cos()


def with_where(x: Any, w: Any, p: Any) -> Any:
    y = (x @ w).sin()
    y = torch.where(p, y * 2, y - 1)
    return (y @ w).cos()


@program(fixed=with_where, inputs=lambda n: (torch.tensor(n % 2 == 0, device="cuda"),))
def cond(x, w, p):
    y = (x @ w).sin()
    y = torch.cond(
        p, lambda a: a * 2, lambda a: a - torch.rand_like(a).clamp(min=1), (y,)
    )  # outside: split-control-flow cond
    return (y @ w).cos()


def three_times(x: Any, w: Any, n: Any) -> Any:
    y = (x @ w).sin()
    for i in range(3):
        y = torch.where(i < n, y * 2, y)
    return (y @ w).cos()


@program(fixed=three_times, inputs=lambda n: (torch.tensor(n % 4, device="cuda"),))
def while_loop(x, w, n):
    y = (x @ w).sin()
    y = while_loop_(positive, doubled, (n, y))[1]  # outside: split-control-flow while_loop
    return (y @ w).cos()


@program(inputs=lambda n: (torch.tensor(n % 3),), fixed=None)
def while_loop_on_the_host(x, w, n):
    y = (x @ w).sin()
    y = while_loop_(positive, doubled, (n, y))[1]  # outside: split-control-flow while_loop
    return (y @ w).cos()


def masked_sum(x: Any, w: Any) -> Any:
    y = (x @ w).sin()
    return torch.where(y > 0, y, 0).sum() + (y @ w).cos().sum()


@program(fixed=masked_sum, dynamo=DATA)
def boolean_mask(x, w):
    y = (x @ w).sin()
    z = y[y > 0]  # outside: split-data-dependent aten::index.Tensor
    return z.sum() + (y @ w).cos().sum()


@program(fixed=lambda x, w: ((x @ w).sin() > 0).sum() + ((x @ w).sin() @ w).cos().sum(), dynamo=DATA)
def nonzero(x, w):
    y = (x @ w).sin()
    z = (y > 0).nonzero()  # outside: split-data-dependent aten::nonzero.default
    return z.size(0) + (y @ w).cos().sum()


def scaled(x: Any, w: Any) -> Any:
    y = (x @ w).sin()
    return (y @ w).cos() * y.sum()


@program(fixed=scaled, dynamo=DATA)
def item(x, w):
    y = (x @ w).sin()
    n = y.sum().item()  # Inductor makes it a tensor
    return (y @ w).cos() * n


@program(dynamo=DATA)
def unique(x, w):
    y = (x @ w).sin()
    z = torch.unique((y * 4).int())  # outside: split-data-dependent aten::_unique2.default
    return z.sum() + (y @ w).cos().sum()  # outside: warm-up


@program(dynamo=DATA)
def repeat_interleave(x, w):
    y = (x @ w).sin()
    z = torch.repeat_interleave((y[0] > 0).long())  # outside: split-data-dependent aten::repeat_interleave.Tensor
    return z.sum() + (y @ w).cos().sum()


def assigned(x: Any, w: Any, v: Any) -> Any:
    y = (x @ w).sin()
    y = torch.where(y > 0, 0.5, y)
    return (y @ w).cos()


@program(fixed=assigned, inputs=lambda n: (torch.tensor(0.5, device="cuda").expand(1),))
def assignment_by_a_mask(x, w, v):
    y = (x @ w).sin()
    y = torch.ops.aten.index_put(y, [y > 0], v)  # Inductor makes it a choice
    return (y @ w).cos()


@program(fixed=whole, inputs=lambda n: (torch.arange(16).float(),))
def computed_on_the_host(x, w, t):
    y = (x @ w).sin()
    n = t.exp().cumsum(0)  # outside: split-host
    return (y @ w).cos(), n


def on_the_device(x: Any, w: Any) -> Any:
    y = (x @ w).sin()
    return (y @ w).cos() + torch.arange(x.size(0), device="cuda").float().sin()


@program(fixed=on_the_device)
def table_made_on_the_host(x, w):
    y = (x @ w).sin()
    table = torch.arange(x.size(0)).float().sin()  # Inductor moves it to the device
    return (y @ w).cos() + table.cuda()


@program(fixed=whole, compiled_at_once=False)
def sparse_result(x, w):
    y = (x @ w).sin()
    s = y.to_sparse()  # outside: graph-break
    return torch.sparse.mm(s, w).cos()  # outside: graph-break


@program(fixed=whole, inductor={"custom_should_partition_ops": ["outside::plain"]})
def named_by_the_user(x, w):
    y = torch.ops.outside.plain(x @ w)  # outside: split-named outside::plain.default
    return (y @ w).cos()


@program(region="split-small", inductor={"triton.cudagraph_min_partition_size": 100})
def few_kernels(x, w):
    y = (x @ w).sin()
    return (y @ w).cos()


@program(dynamic=True, inductor={"triton.cudagraph_skip_dynamic_graphs": True}, region="split-dynamic")
def dynamic_sizes(x, w):
    y = (x @ w).sin()
    return (y @ w).cos()
