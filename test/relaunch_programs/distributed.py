"""Two processes, two GPUs: gradients and parameters that collectives bring. Without GPUs, two processes on the host.

Every rank runs the body, in a process group that is there already, and compares its own sides.

The models have a `forward` of their own. DDP and FSDP2 do their work in eager code around it, and Dynamo goes on where
that calls code of the user's; in torch's own modules it begins no graph. An nn.Sequential under DDP is not compiled.
"""

import torch
import torch.distributed as dist
from torch import nn

from relaunch_programs._program import Kit, program
from relaunch_programs.parameters import network


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.back = nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(self.network(x)).tanh()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = Block(), nn.Linear(32, 32), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(x)))


class Wide(nn.Module):
    """Three layers of a MiB each: as many buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(32, 512)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inside(x)
        for layer in self.layers:
            x = layer(x).relu()
        return x


def train(k: Kit, f: nn.Module, parameters: list[torch.Tensor], calls: int = 8) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    k.generator.manual_seed(50 + dist.get_rank())
    for _ in k.steps(calls):
        loss = f(k.randn(16, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        k.see("loss", loss)


def in_ddp(k: Kit, module: nn.Module, **options: float) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module, device_ids=[dist.get_rank()] if k.gpu else None, **options)


@program("DDP: gradients are reduced when the backward is done", ranks=2, launches=12, loose=10)
def ddp(k: Kit) -> None:
    model = k.module(Blocks())
    wrapped = in_ddp(k, model)
    train(k, k.compile(wrapped), list(wrapped.parameters()))
    k.see("parameters", list(model.parameters()))


@program(
    "DDP cuts the function where a bucket is full, and reduces while the backward runs", ranks=2, launches=48, loose=10
)
def ddp_buckets(k: Kit) -> None:
    model = k.module(Wide())
    wrapped = in_ddp(k, model, bucket_cap_mb=1)
    train(k, k.compile(wrapped), list(wrapped.parameters()))
    k.see("parameters", list(model.parameters()))


@program("FSDP2: parameters are gathered into other memory for every use", ranks=2, launches=24, loose=10)
def fsdp2(k: Kit) -> None:
    from torch.distributed.fsdp import fully_shard

    model = k.module(Blocks())
    for block in (model.first, model.last):
        k.compile_in_place(block)
        fully_shard(block)
    fully_shard(model)
    train(k, model, list(model.parameters()))
    k.see("parameters", [p.full_tensor() for p in model.parameters()])


@program("FSDP2 in a compiled model: its hooks break the graph", ranks=2, launches=36, loose=10)
def fsdp2_inside(k: Kit) -> None:
    from torch.distributed.fsdp import fully_shard

    model = k.module(Blocks())
    for block in (model.first, model.last):
        fully_shard(block)
    fully_shard(model)
    train(k, k.compile(model), list(model.parameters()))
    k.see("parameters", [p.full_tensor() for p in model.parameters()])


@program("collectives inside the compiled function are split off", ranks=2, launches=18)
def collectives(k: Kit) -> None:
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD

    def fn(x):
        y = torch.tanh(x @ x.t() / 8)
        total = functional.all_reduce(y, "sum", group)
        parts = functional.all_gather_tensor(x[:4] * 2, 0, group)
        return total.relu() + y, parts.sum(0)

    f = k.compile(fn)
    k.generator.manual_seed(60 + dist.get_rank())
    for _ in k.steps():
        k.see("outputs", f(k.randn(16, 64)))


@program("collectives in a backward, between saved tensors and gradients", ranks=2, launches=18, loose=10)
def collectives_of_a_backward(k: Kit) -> None:
    import torch.distributed._functional_collectives as functional

    group = dist.group.WORLD
    w = k.randn(64, 64).requires_grad_()

    def fn(x):
        gathered = functional.all_gather_tensor_autograd((x @ w).tanh(), 0, group)
        return (gathered @ w).sin().sum(0)

    f = k.compile(fn)
    k.generator.manual_seed(70 + dist.get_rank())
    for _ in k.steps():
        x = k.randn(16, 64, grad=True)
        f(x).square().sum().backward()
        k.see("gradients", (x.grad, w.grad))
        w.grad = None
