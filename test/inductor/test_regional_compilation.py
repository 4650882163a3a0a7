"""A model whose repeated blocks are compiled, not the whole: one code and one graph serve all blocks of the same code.

The graphs are those of `host_graphs`. Each step is compared with eager's, and compilations and captures are counted.
"""

import copy
import itertools
from collections.abc import Callable

import torch
from host_graphs import counted, host_graphs
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form


BLOCKS, STEPS = 6, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class NestedRegion(Block):
    @torch.compiler.nested_compile_region
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def in_place(model: Model) -> None:
    """As `compile_repeated_blocks` of diffusers."""
    for block in model.blocks:
        block.compile()


def by_module(model: Model) -> None:
    for name, block in enumerate(model.blocks):
        model.blocks[name] = torch.compile(block)


def by_forward(model: Model) -> None:
    """As transformers compile the layers of a model."""
    for block in model.blocks:
        block.forward = torch.compile(block.forward)


def move(model: Model, held: list[torch.Tensor]) -> None:
    """Move all parameters, as FSDP2 does for each use. Their new places are aligned to 16 bytes and no more."""
    for parameter in model.parameters():
        held.append(torch.empty(4 + parameter.numel()))  # the next one lies elsewhere
        parameter.data = held[-1][4:].view(parameter.shape).copy_(parameter.data)


@instantiate_parametrized_tests
class TestBlocks(TestCase):
    def setUp(self) -> None:
        super().setUp()
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        self.enterContext(host_graphs())
        self.held: list[torch.Tensor] = []

    def model(self, compile_blocks: Callable[[Model], None]) -> tuple[Model, Model]:
        model = Model()
        eager = copy.deepcopy(model)
        compile_blocks(model)
        return model, eager

    def step(self, model: nn.Module, eager: nn.Module, train: bool) -> None:
        x, found = torch.randn(4, 16), []
        for each in (model, eager):
            with torch.set_grad_enabled(train):
                y = each(x)
            each.zero_grad()
            if train:
                y.square().sum().backward()
            found.append([y.detach(), *(p.grad for p in each.parameters() if train)])
        self.assertEqual(*found)

    def steps(self, model: Model, eager: nn.Module, train: bool = False, moves: bool = False) -> list[tuple[int, int]]:
        """Return how many graphs were captured and launched after each step."""
        seen = []
        for _ in range(STEPS):
            if moves:
                move(model, self.held)
            self.step(model, eager, train)
            seen.append(counted())
        return seen

    @parametrize("compile_blocks", form.sampled([in_place, by_module, by_forward], 3))
    @parametrize("moves", [False, True])
    def test_one_graph_serves_all(self, compile_blocks: Callable[[Model], None], moves: bool) -> None:
        seen = self.steps(*self.model(compile_blocks), moves=moves)
        # The first block runs as compiled, the second is captured, all others are launched.
        self.assertEqual(seen, [(1, BLOCKS * (i + 1) - 1) for i in range(STEPS)])
        self.assertEqual(counters["stats"]["unique_graphs"], 1)

    @parametrize("moves", [False, True])
    def test_one_graph_of_each_kind_trains_all(self, moves: bool) -> None:
        """Dynamo has code of its own for the first block, whose input needs no gradient, and one for all others."""
        seen = self.steps(*self.model(in_place), train=True, moves=moves)
        self.assertEqual([captures for captures, _ in seen], [2, *[4] * (STEPS - 1)])
        self.assertEqual({b[1] - a[1] for a, b in itertools.pairwise(seen[1:])}, {2 * BLOCKS})
        self.assertEqual(counters["stats"]["unique_graphs"], 2)

    @parametrize("train", form.sampled([False, True], 2))
    def test_nested_region_is_compiled_once_in_one_graph(self, train: bool) -> None:
        model = Model(NestedRegion)
        eager = copy.deepcopy(model)
        model.compile()
        seen = self.steps(model, eager, train, moves=True)
        each = 1 + train
        self.assertEqual(seen, [(0, 0), *((each, each * i) for i in range(1, STEPS))])

    def test_stance_changes_and_no_graph_is_made_anew(self) -> None:
        model, eager = self.model(in_place)
        self.steps(model, eager)
        captures, launches = counted()
        compiled = counters["stats"]["unique_graphs"]
        for stance, launched in (("force_eager", 0), ("eager_on_recompile", BLOCKS), ("fail_on_recompile", BLOCKS)):
            with torch.compiler.set_stance(stance):
                self.step(model, eager, train=False)
            self.assertEqual(counted(), (captures, launches := launches + launched), stance)
            self.step(model, eager, train=False)
            self.assertEqual(counted(), (captures, launches := launches + BLOCKS), f"after {stance}")
        self.assertEqual(counters["stats"]["unique_graphs"], compiled)

    def test_what_would_be_compiled_anew_is_not(self) -> None:
        model, eager = self.model(in_place)
        self.steps(model, eager)
        seen, compiled = counted(), counters["stats"]["unique_graphs"]
        for each in (model, eager):
            each.double()
        x = torch.randn(4, 16, dtype=torch.float64)
        with torch.no_grad(), torch.compiler.set_stance("eager_on_recompile"):
            self.assertEqual(model(x), eager(x))
        with torch.no_grad(), torch.compiler.set_stance("fail_on_recompile"):
            self.assertRaisesRegex(RuntimeError, "fail_on_recompile", model, x)
        self.assertEqual((counted(), counters["stats"]["unique_graphs"]), (seen, compiled))
        for each in (model, eager):
            each.float()
        self.step(model, eager, train=False)
        self.assertEqual(counted(), (seen[0], seen[1] + BLOCKS))
