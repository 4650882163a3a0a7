"""One rank of the tests of data parallel training: trains a small model in each of the `CASES`, on three sides.

    eager     nothing is compiled
    stock     without the overlay
    graphs    with it, and with the graphs of `host_graphs`

`main(request)` writes for each case and side the losses and the parameters, as lists, and how many graphs were captured
and launched after each step. The request has `rank`, `rendezvous` (a file that both ranks name), `cases`, and `out`.
"""

import contextlib
import dataclasses
import io
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from host_graphs import counted, host_graphs
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import form


RANKS, STEPS = 2, 6


@dataclasses.dataclass(frozen=True)
class Case:
    """`around`: the wrapped model is compiled, not its blocks. `sharded`: by FSDP2, instead of DDP. `accumulate`: so
    many batches for a step, of which only the last is reduced. `resume`: after half of the steps, what was saved is
    loaded by new objects."""

    optimizer: Callable[[Any], torch.optim.Optimizer]
    around: bool = False
    sharded: bool = False
    accumulate: int = 1
    low_precision: bool = False
    clip: bool = False
    compiled_step: bool = False
    resume: bool = False


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def one_by_one(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)


CASES = {
    "compiled_around_ddp_in_buckets": Case(sgd, around=True),
    "blocks_compiled_inside_of_ddp": Case(sgd),
    "blocks_compiled_inside_of_fsdp2": Case(sgd, sharded=True),
    "batches_that_are_not_reduced": Case(sgd, around=True, accumulate=3),
    "autocast_and_clipped_gradients": Case(adamw, low_precision=True, clip=True),
    "fused_optimizer": Case(fused, clip=True),
    "compiled_step_of_the_optimizer": Case(one_by_one, compiled_step=True),
    "checkpoint_in_the_middle": Case(adamw, around=True, accumulate=2, resume=True),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Training:
    """A model in DDP, or sharded, and its optimizer, compiled as the case says."""

    def __init__(self, case: Case, compiles: bool) -> None:
        self.case = case
        self.module = Model()
        if compiles and not case.around:
            for block in self.module.blocks:
                block.compile()
        self.wrapped: Any = self.module
        if case.sharded:
            for part in (*self.module.blocks, self.module):
                fully_shard(part)
        else:
            self.wrapped = DistributedDataParallel(self.module, bucket_cap_mb=0.01)
        self.model = torch.compile(self.wrapped) if compiles and case.around else self.wrapped
        self.optimizer = case.optimizer(self.module.parameters())
        self.update = torch.compile(self.optimizer.step) if compiles and case.compiled_step else self.optimizer.step

    def step(self) -> float:
        total = 0.0
        for batch in range(self.case.accumulate):
            is_last = batch == self.case.accumulate - 1
            with contextlib.nullcontext() if is_last else self.wrapped.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=self.case.low_precision):
                    loss = self.model(torch.randn(8, 32)).float().square().mean()
                loss.backward()
            total += loss.item()
        if self.case.clip:
            nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)
        self.update()
        self.optimizer.zero_grad()
        return total

    def save(self) -> io.BytesIO:
        file = io.BytesIO()
        torch.save((self.module.state_dict(), self.optimizer.state_dict()), file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        module, optimizer = torch.load(file)
        self.module.load_state_dict(module)
        self.optimizer.load_state_dict(optimizer)


def train(case: Case, compiles: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(3)
    training = Training(case, compiles)
    torch.manual_seed(10 + dist.get_rank())
    losses, graphs = [], []
    for step in range(STEPS):
        if case.resume and step == STEPS // 2:
            file, state = training.save(), torch.get_rng_state()
            training = Training(case, compiles)
            training.load(file)
            torch.set_rng_state(state)
        losses.append(training.step())
        graphs.append(counted())
    whole = [p.full_tensor() if case.sharded else p for p in training.module.parameters()]
    return {"losses": losses, "parameters": [p.detach().flatten().tolist() for p in whole], "graphs": graphs}


@contextlib.contextmanager
def side(name: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if name == "graphs":
            stack.enter_context(host_graphs())
        elif name == "stock":
            stack.enter_context(inductor_config.patch(fallback_by_default=True))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # what is compiled already stays as it is: here all is compiled anew
            form.overlay.disable()
            stack.callback(form.overlay.enable)
        yield


def main(request: dict[str, Any]) -> None:
    store = dist.FileStore(request["rendezvous"], RANKS)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 4096  # the model is small, and to be cut
    dist.init_process_group("gloo", store=store, rank=request["rank"], world_size=RANKS)
    found: dict[str, dict[str, Any]] = {}
    for case in request["cases"]:
        found[case] = {}
        for name in ("eager", "stock", "graphs"):
            with side(name):
                found[case][name] = train(CASES[case], compiles=name != "eager")
    dist.barrier()
    Path(request["out"]).write_text(json.dumps(found))
    dist.destroy_process_group()
