"""A program without streams is compiled to the same text, byte for byte, with the overlay and without it.

Each program is compiled twice in one process, by stock PyTorch and with the overlay enabled, and all wrappers that
Inductor generates are compared, kernels included, and all graphs that reach it. Only what differs between two stock
runs is made equal: the running number of the AOT graph, and the name of the temporary folder in a comment.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import unittest
import warnings
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import nn

import form
from torch_overlay import config as overlay_config
from torch_overlay._dynamo import registry
from torch_overlay.testing import compile_only, Compiled, simulated_gpu


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Program = tuple[Callable[..., Any], tuple[Any, ...]]

_RUNNING_NUMBER = re.compile(r"(?m)^# AOT ID: \['\d+_")
_FOLDER = re.compile(r"(?m)^(# kernel path: )\S*/simulated_gpu_[^/]*/")


def text(compiled: Compiled) -> str:
    """All that was generated, without what two stock runs don't have in common."""
    parts = [*compiled.wrappers, *compiled.graphs]
    return "\n\n".join(_FOLDER.sub(r"\1", _RUNNING_NUMBER.sub("# AOT ID: ['", part)) for part in parts)


@contextlib.contextmanager
def stock() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is compiled already stays as it is: each compilation here is a new one
        form.overlay.disable()
        try:
            yield
        finally:
            form.overlay.enable()


def cuda(*shape: int, **kwargs: Any) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", **kwargs)


@triton.jit
def double_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


def same(wrappers: int = 1, **options: Any) -> Callable[..., Any]:
    """A test of the program that is made in its place."""
    return lambda make: lambda self: self.check(make, wrappers, **options)


@form.overlay_only
class TestByteIdentity(unittest.TestCase):
    def check(self, make: Callable[[], Program], wrappers: int = 1, **options: Any) -> None:
        """`make` builds the program anew for each compilation. `wrappers` is the number of wrappers to be seen."""

        def compile_it() -> Compiled:
            with simulated_gpu():
                function, args = make()
                return compile_only(function, *args, **options)

        torch.compiler.reset()
        with mock.patch.object(registry, "_has_streams", False):  # other tests of the process have some
            ours = compile_it()
        with stock():
            theirs = compile_it()
        self.assertEqual(ours.plans, [])
        self.assertEqual(len(theirs.wrappers), wrappers)
        self.assert_same(text(theirs), text(ours))

    def assert_same(self, stock_text: str, overlay_text: str) -> None:
        if stock_text != overlay_text:
            lines = difflib.unified_diff(
                stock_text.splitlines(), overlay_text.splitlines(), "stock", "overlay", lineterm=""
            )
            self.fail("\n".join(lines))

    # -- layers

    def test_pointwise_and_reduction(self) -> None:
        self.check(lambda: (lambda x, y: ((x.sin() + y).softmax(-1), (x * y).sum()), (cuda(64, 128), cuda(64, 128))))

    @same()
    def test_mlp() -> Program:
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8))
        return model.cuda().requires_grad_(False), (cuda(16, 64),)

    @same()
    def test_conv_net() -> Program:
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(392, 10)
        return nn.Sequential(*layers).cuda().eval().requires_grad_(False), (cuda(4, 3, 16, 16),)

    @same()
    def test_attention() -> Program:
        function = nn.functional.scaled_dot_product_attention
        query = cuda(2, 4, 64, 64, dtype=torch.bfloat16)
        return lambda q, k, v: function(q, k, v, is_causal=True).transpose(1, 2), (query, query, query)

    # -- models of transformers

    @form.slow
    def test_gpt2(self) -> None:
        self.check(gpt2)

    @form.slow
    @same()
    def test_bert() -> Program:
        from transformers import BertConfig, BertModel

        size = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
        config = BertConfig(**size, num_hidden_layers=1, num_attention_heads=4)
        model = BertModel(config).cuda().eval().requires_grad_(False)
        return lambda ids: model(ids).last_hidden_state, (tokens(),)

    @form.slow
    @same()
    def test_llama() -> Program:
        from transformers import LlamaConfig, LlamaForCausalLM

        size = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
        config = LlamaConfig(**size, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
        model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval().requires_grad_(False)
        return lambda ids: model(ids, use_cache=False).logits, (tokens(),)

    # -- training

    @same(wrappers=2, backward=True)
    def test_training_of_mlp() -> Program:
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).cuda()
        return lambda x: model(x).square().mean(), (cuda(16, 64),)

    @form.slow
    def test_training_of_gpt2(self) -> None:
        self.check(lambda: gpt2(training=True), wrappers=2, backward=True)

    @same(wrappers=2, backward=True)
    def test_training_with_dropout() -> Program:
        block = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 32)).cuda()
        return lambda x: block(x).sum(), (cuda(8, 32),)

    @same(wrappers=2, backward=True)
    def test_training_with_recomputation() -> Program:
        block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).cuda()
        return lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).sum(), (cuda(8, 32),)

    @same(fullgraph=False)
    def test_optimizer_step() -> Program:
        parameters = [cuda(8, 8).requires_grad_() for _ in range(4)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(parameters, foreach=True, capturable=True)
        return optimizer.step, ()

    @same(fullgraph=False)
    def test_fused_optimizer_step_of_clipped_gradients() -> Program:
        parameters = [cuda(8, 8).requires_grad_() for _ in range(4)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW(parameters, fused=True, capturable=True)

        def step() -> None:
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()

        return step, ()

    @same(wrappers=2, backward=True)
    def test_training_under_autocast() -> Program:
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8)).cuda()

        def loss(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return model(x).float().square().mean()

        return loss, (cuda(16, 64),)

    # -- modes

    def test_compiled_on_one_rank(self) -> None:
        def make() -> Program:
            model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).cuda()
            return lambda x: model(x).square().mean() + torch.ones((), device="cuda"), (cuda(16, 64),)

        with torch.compiler.config.patch(compile_on_one_rank=True):
            self.check(make, wrappers=2, backward=True)

    def test_dynamic_shapes(self) -> None:
        self.check(
            lambda: (lambda x, y: (torch.cat([x, y]).cumsum(0), x.size(0) + 1), (cuda(5, 7), cuda(6, 7))), dynamic=True
        )

    def test_reduce_overhead(self) -> None:
        self.check(lambda: (lambda x: (x @ x).relu().sum(0), (cuda(32, 32),)), mode="reduce-overhead")

    def test_reduce_overhead_with_a_partition(self) -> None:
        self.check(lambda: (lambda x: ((x + 1).cpu() * 2).cuda() @ x, (cuda(32, 32),)), mode="reduce-overhead")

    def test_reduce_overhead_of_training(self) -> None:
        def make() -> Program:
            model = nn.Linear(16, 16).cuda()
            return lambda x: model(x).tanh().sum(), (cuda(4, 16),)

        self.check(make, wrappers=2, backward=True, mode="reduce-overhead")
        with overlay_config.patch(cudagraphs="trees"):
            self.check(make, wrappers=2, backward=True, mode="reduce-overhead")

    def test_max_autotune(self) -> None:
        self.check(lambda: (lambda x: (x @ x).relu(), (cuda(128, 128),)), mode="max-autotune-no-cudagraphs")

    # -- things that a graph can hold

    def test_input_mutation_and_views(self) -> None:
        self.check(lambda: (lambda x, y: (x.add_(y), y[2:].view(-1), x.t()), (cuda(8, 8), cuda(8, 8))))

    def test_graph_break(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            x = x.sin()
            torch._dynamo.graph_break()
            return x.cos()

        self.check(lambda: (function, (cuda(16),)), wrappers=2, fullgraph=False)

    @same()
    def test_pinned_and_plain_copies_between_host_and_device() -> Program:
        host = torch.randn(64).pin_memory()
        return lambda h, x: (h.to("cuda", non_blocking=True) + x, x.cpu()), (host, cuda(64))

    def test_conditional(self) -> None:
        def function(flag: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(flag, lambda x: x.sin(), lambda x: x @ x, (x,))

        flag = {"dtype": torch.bool, "device": "cuda"}
        self.check(lambda: (function, (torch.ones((), **flag), cuda(8, 8))), wrappers=3)

    def test_user_triton_kernel(self) -> None:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = torch.empty_like(x)
            double_kernel[(x.numel() // 64,)](x, y, x.numel(), BLOCK=64)
            return y + 1

        self.check(lambda: (function, (cuda(256),)))

    def test_two_devices(self) -> None:
        with simulated_gpu(devices=2):
            self.check(lambda: (lambda x: (x + 1).to("cuda:1") * 2, (cuda(16, 16),)))

    # -- the method itself

    def test_a_program_with_streams_does_differ(self) -> None:
        def make() -> Program:
            side = torch.cuda.Stream()

            def function(x: torch.Tensor) -> torch.Tensor:
                current = torch.cuda.current_stream()
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    y = x.sin()
                current.wait_stream(side)
                return y + 1

            return function, (cuda(16),)

        with simulated_gpu(), stock():
            function, args = make()
            theirs = text(compile_only(function, *args))
        with simulated_gpu():
            function, args = make()
            ours = text(compile_only(function, *args))
        self.assertNotEqual(theirs, ours)

    @form.slow
    def test_a_process_that_never_enabled_the_overlay_generates_the_same(self) -> None:
        code = """
import sys
from pathlib import Path
import form
import torch
from test_byte_identity import cuda, simulated_gpu, compile_only, text
assert form.overlay.status().enabled == (sys.argv[1] == "on")
with simulated_gpu():
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Softmax(-1)).cuda()
    print(text(compile_only(lambda x: model(x).sum(), cuda(4, 16), backward=True)))
"""
        path = str(form.ROOT / "test" / "inductor")
        outputs = []
        for disable, state in (("1", "off"), ("0", "on")):
            script = f"import sys; sys.path.insert(0, {path!r}); sys.argv = ['', {state!r}]\n{code}"
            result = form.fork_python(script, env={"TORCH_OVERLAY_DISABLE": disable})
            self.assertEqual(result.returncode, 0, result.stderr[-3000:])
            outputs.append(result.stdout)
        self.assertIn("def call(self, args)", outputs[0])
        self.assert_same(*outputs)


def tokens() -> torch.Tensor:
    return torch.zeros(2, 16, dtype=torch.long, device="cuda")


def gpt2(training: bool = False) -> Program:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=1, n_head=4, use_cache=False)
    model = GPT2LMHeadModel(config).cuda().train(training).requires_grad_(training)
    if training:
        return lambda ids: nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten()), (tokens(),)
    return lambda ids: model(ids).logits, (tokens(),)
