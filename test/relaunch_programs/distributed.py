"""Two processes, two GPUs: gradients and parameters that collectives bring. Without GPUs, two processes on the host.

Every rank runs the body, in a process group that is there already, and compares its own sides.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from relaunch_programs._program import Kit, program
from relaunch_programs.parameters import network


def train(k: Kit, f: nn.Module, parameters: list[torch.Tensor], calls: int = 8) -> None:
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    k.generator.manual_seed(50 + dist.get_rank())
    for _ in k.steps(calls):
        loss = f(k.randn(16, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        k.see("loss", loss)


@program("DDP: buckets are reduced while the backward runs", ranks=2, launches=4, loose=10)
def ddp(k: Kit) -> None:
    model = k.module(network())
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[dist.get_rank()] if k.gpu else None)
    train(k, k.compile(wrapped), list(wrapped.parameters()))
    k.see("parameters", list(model.parameters()))


@program("FSDP2: parameters are gathered into other memory for every use", ranks=2, launches=2, loose=10)
def fsdp2(k: Kit) -> None:
    from torch.distributed.fsdp import fully_shard

    model = k.module(nn.Sequential(network(), nn.Linear(8, 32), network()))
    blocks = [model[0], model[2]]
    for block in blocks:
        block.compile(**({"mode": "reduce-overhead"} if k.graphs else {})) if k.side in ("plain", "graphs") else None
        fully_shard(block)
    fully_shard(model)
    train(k, model, list(model.parameters()))
    k.see("parameters", [p.full_tensor() for p in model.parameters()])


@program("collectives inside the compiled function are captured, or split off", ranks=2, refusals=True, launches=0)
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
