"""Training on several GPUs, with DDP and with FSDP2: graphs between the collectives.

DDP compiles the wrapped model as a whole, and reduces gradients when a bucket is full. FSDP2 gathers the parameters of
a block before it runs, into other memory for every step, so each block is compiled by itself. Collectives run between
graphs, in the program's order on every rank. Parameters that moved are pointers that a launch writes.

    torchrun --nproc-per-node 2 examples/train_ranks.py
    python examples/train_ranks.py         # one process: a world of one GPU, or without a GPU rank 0 of two simulated
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import torch_overlay
from torch_overlay.testing import simulated_gpu


WIDTH, LAYERS, STEPS, MODE = 512, 3, 5, "reduce-overhead"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def in_ddp(blocks: nn.Module, mesh: DeviceMesh) -> nn.Module:
    wrapped = nn.parallel.DistributedDataParallel(blocks, process_group=mesh.get_group())
    wrapped.compile(mode=MODE)
    return wrapped


def in_fsdp2(blocks: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in blocks.children():
        block.compile(mode=MODE)
        fully_shard(block, mesh=mesh)
    fully_shard(blocks, mesh=mesh)
    return blocks


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        model(torch.randn(64, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def join(simulated: bool) -> DeviceMesh:
    """Make the process group, without torchrun of this process alone; outside of a simulation, where numbers of tensors
    are made up."""
    if simulated:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    else:
        for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}.items():
            os.environ.setdefault(name, value)
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    return init_device_mesh("cuda", (dist.get_world_size(),))


def main() -> None:
    simulated = not torch.cuda.is_available()
    mesh = join(simulated)
    with simulated_gpu() if simulated else nullcontext():
        # DDP copies gradients into buckets in C++, which tensors without memory don't survive.
        for wrap in (in_fsdp2,) if simulated else (in_ddp, in_fsdp2):
            torch._dynamo.reset()
            train(wrap(nn.Sequential(*(Block() for _ in range(LAYERS))).to("cuda"), mesh))
            if dist.get_rank() == 0:
                print(f"{wrap.__name__}\n{torch_overlay.coverage()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
