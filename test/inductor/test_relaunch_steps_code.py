"""Code that Inductor generates for a GPU, run as steps: kernels get what the code as it is gives them.

Inductor compiles each program for a simulated GPU. Its module then runs on host memory, with kernels in place of
Triton's that note what they get: grid, numbers, addresses. The launcher of a kernel is made of Inductor's own grid
expressions. As steps, the same code launches them by a driver that records. So all that C computes from sizes that no
call has shown is compared with what the generated code computes for them.
"""

import ctypes
import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from drawn_sizes import drawn
from torch._inductor.runtime import triton_heuristics
from torch.nn import functional as F
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

import form
from stand_ins import relaunch_driver
from stand_ins.relaunch_case import RelaunchTestCase
from torch_overlay import config
from torch_overlay._inductor.relaunch.launch import executable
from torch_overlay._inductor.relaunch.steps import Steps
from torch_overlay.testing import compile_only, simulated_gpu


LETTERS = {"i32": "l", "i64": "l", "fp64": "d"}  # the fake device has words of eight bytes
CONFIG = {"XBLOCK": 8, "YBLOCK": 4, "ZBLOCK": 2, "R0_BLOCK": 16, "R1_BLOCK": 4, "RSPLIT": 2, "RSPLIT_SIZE": 64}


class NotedKernel:
    """A kernel of a generated module, which notes what it is launched with."""

    def __init__(self, log: list[Any], name: str, meta: dict[str, Any]) -> None:
        signature = {k: v for k, v in meta["triton_meta"]["signature"].items() if v != "constexpr"}
        letters = "".join("O" if kind.startswith("*") else LETTERS[kind] for kind in signature.values())
        # A split scan takes a row a block.
        blocks = CONFIG | ({"XBLOCK": 1} if meta["inductor_meta"]["grid_type"] == "SplitScanGrid" else {})
        grid = triton_heuristics.GridExpr.from_meta(meta["inductor_meta"], blocks)
        lines = [*grid.prefix, f"runner({grid.x_grid}, {grid.y_grid}, {grid.z_grid}, stream, {', '.join(signature)})"]
        # A function of the recording driver is a table of its parameters' sizes.
        self.table = (ctypes.c_uint64 * (1 + len(letters)))(len(letters), *[8] * len(letters))
        binary = {"arg_tys": letters, "function": ctypes.addressof(self.table), "num_warps": 1, "shared": 0}
        scope = {"runner": self.launch, "bin": SimpleNamespace(**binary, name=name)}
        given = ", ".join(k for k in meta["triton_meta"]["signature"] if k not in CONFIG)
        exec(f"def launcher({given}, stream):\n" + "\n".join(f"    {line}" for line in lines), scope)
        scope["launcher"]._is_static = True
        self.launchers = [scope["launcher"]]
        self._cache_eligible = True
        self.name, self.handle, self.arg_tys, self.log = name, scope["bin"].function, letters, log

    def run(self, *args: Any, stream: Any) -> None:
        self.launchers[0](*args, stream=stream)

    def launch(self, x: int, y: int, z: int, stream: Any, *args: Any) -> None:
        assert all(type(v) is int for v in (x, y, z))
        if x and y and z:  # as Triton's launchers do
            self.log.append((self.name, (x, y, z), *[a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]))


class Module:
    """A generated module on the fake device."""

    def __init__(self, device: Any, text: str) -> None:
        self.log: list[Any] = []
        text = text.replace("with torch.cuda._DeviceGuard(0):", "if True:")
        text = text.replace("torch.cuda.set_device(0)", "pass")
        self.namespace: dict[str, Any] = {"__name__": "generated"}
        compiler = SimpleNamespace(triton=self._kernel, wait=lambda scope: None)
        with mock.patch("torch._inductor.async_compile.AsyncCompile", lambda: compiler):
            exec(text, self.namespace)
        self.namespace |= {"empty_strided_cuda": device.empty, "get_raw_stream": lambda index: 0}

    def _kernel(self, name: str, source: str, **_: Any) -> NotedKernel:
        metas: list[dict[str, Any]] = []

        class Heuristics:
            def __getattr__(self, kind: str) -> Any:
                return lambda **meta: lambda fn: metas.append(meta)

        lines = source.replace("@triton.jit", "").replace(", triton_heuristics", "")
        lines = lines.replace("triton_helpers.set_driver_to_gpu()", "")
        exec(compile(lines, "kernel.py", "exec"), {"triton_heuristics": Heuristics(), "__file__": "kernel.py"})
        return NotedKernel(self.log, name, metas[0])


def softmax_cat_transpose(x, y):
    a = torch.softmax(x * 2, -1)
    b = torch.cat([a, y], 0)
    return b.transpose(0, 1).contiguous().sin(), a.sum(0), b[3:]


def norm_and_residual(x, y):
    return F.layer_norm(x + y, x.shape[-1:]) * x.shape[0], (x * y).amax(1)


def chain_of_sums(x, y):
    for _ in range(3):
        x = (x - x.mean(0)) / (1 + y.abs().sum(1, keepdim=True)[: x.shape[0]])
    return x, x.shape[0] * 2


def pieces(x, y):
    a, b = torch.cat([x.cos(), y.sin(), x.exp()], 1).chunk(2, 1)
    return a.contiguous() + 1, b * 2, F.pad(x, (1, 2, 3, 0))


def in_place(x, y):
    x.mul_(y.sum())
    return x[1:] + x[:-1]


def scan(x, y):
    return x.cumsum(1), y.cumsum(0).flip(0)


def bounded(x, y):
    return F.pad(x, (0, 0, 0, max(40 - x.shape[0], 0))).cos(), y[: min(40, y.shape[0])] * 2


PROGRAMS = {
    softmax_cat_transpose: lambda n, m: ((n, m), (n + 1, m)),
    norm_and_residual: lambda n, m: ((n, m), (n, m)),
    chain_of_sums: lambda n, m: ((n, m), (n, 7)),
    pieces: lambda n, m: ((n, m), (n, 2 * m)),
    in_place: lambda n, m: ((n, m), (m,)),
    scan: lambda n, m: ((n, m), (n, m)),
    bounded: lambda n, m: ((n, m), (n, m)),
}
DRAWN_SIZES = [(37, 300), (5, 64), (41, 6), (6, 1000), (130, 33), (7, 7), (37, 300), (64, 16), (2, 3), (513, 65)]
SIZES = [(37, 300), (5, 64), (41, 6), (6, 1000), (2048, 33), (7, 7), (37, 300), (513, 65)]


def training(x, y):
    return (F.layer_norm(x.sin() + y, x.shape[-1:]).softmax(0) * x.shape[0]).transpose(0, 1)


def training_with_pieces(x, y):
    a, b = torch.cat([x.exp(), y], 0).tanh().split([x.shape[0], y.shape[0]], 0)
    return (a * b.sum(0)).cumsum(0)


def arguments_of(text, shapes):
    """Return what each parameter of `call` is, from the sample that a module has for its own benchmark: the position
    of a tensor, or (position, dimension) of a size."""
    scope = {"torch": torch}
    body = text[text.index("def get_args():") : text.index("def benchmark_compiled_module")]
    exec(body.replace("device='cuda:0', ", ""), scope)
    sizes = {n: (i, d) for i, shape in enumerate(shapes) for d, n in enumerate(shape)}
    left, found = list(range(len(shapes))), []
    for value in scope["get_args"]():
        if isinstance(value, torch.Tensor):
            found.append(next(k for k in left if tuple(shapes[k]) == tuple(value.shape)))
            left.remove(found[-1])
        else:
            found.append(sizes[value])
    return found


def drawn_arguments(parameters, shapes):
    """Return what `call` takes: tensors of these shapes, and their sizes."""
    given = [torch.randn(shape) for shape in shapes]
    return [given[k[0]].shape[k[1]] if isinstance(k, tuple) else given[k] for k in parameters]


DEVICE = SimpleNamespace(index=0, stream_of=lambda index: 0, current=lambda: 0, functions=(0, 0, 0))


class Compared:
    """A generated module as it is, and once more with its partitions run as steps. What they allocate in a call lives
    until its end: memory that is given out again would be taken for a later allocation."""

    def __init__(self, case, text):
        self.case, self.held = case, []
        self.plain, self.ours = Module(case.device, text), Module(case.device, text)
        self.steps = [Steps(partition, DEVICE) for partition in self.ours.namespace["runner"].partitions]
        for module in (self.plain, self.ours):
            module.namespace["empty_strided_cuda"] = self.allocate
        waiting = iter(self.steps)
        self.ours.namespace["recursively_apply_fns"]([lambda _: next(waiting).run for _ in self.steps])
        self.kernels = {v.handle: v for v in self.ours.namespace.values() if isinstance(v, NotedKernel)}

    def allocate(self, *asked):
        self.held.append(self.case.device.empty(*asked))
        return self.held[-1]

    def call(self, arguments):
        """Return the outputs of the code as steps, after comparing what both have launched."""
        described = []
        for module in (self.plain, self.ours):
            module.log.clear()
            relaunch_driver.driver().take()
            outputs = module.namespace["call"](list(arguments))
            module.log += map(self.launched, relaunch_driver.driver().take())
            views = [(v.size(), v.stride(), v.dtype) if isinstance(v, torch.Tensor) else v for v in outputs]
            described.append((views, self.launches(module, arguments, outputs)))
        self.case.assertEqual(described[1], described[0])
        self.held.clear()
        return outputs

    def launched(self, line):
        """A launch of the driver, as a kernel notes one."""
        _, function, grid, block, _, _, words, _ = line
        kernel = self.kernels[int(function, 16)]
        self.case.assertEqual(block, "32,1,1")
        letters = kernel.launchers[0].__globals__["bin"].arg_tys
        values = [bytes.fromhex(word) for word in words.split(",")]
        as_float = [letter == "d" for letter in letters]
        numbers = [
            ctypes.c_double.from_buffer_copy(v).value if is_float else int.from_bytes(v, "little", signed=True)
            for v, is_float in zip(values, as_float, strict=True)
        ]
        return (kernel.name, tuple(map(int, grid.split(","))), *numbers)

    def launches(self, module, arguments, outputs):
        """What kernels got, with addresses as places in arguments and outputs."""
        memory = {}
        for i, value in enumerate([*arguments, *outputs]):
            if isinstance(value, torch.Tensor):
                memory.setdefault(value.untyped_storage().data_ptr(), (value.untyped_storage().nbytes(), i))

        def place(word, letter):
            held = [(i, word - start) for start, (size, i) in memory.items() if start <= word < start + size]
            return word if letter != "O" else held[0] if held else "scratch"

        return [
            (name, grid, *[place(w, letter) for w, letter in zip(words, module.namespace[name].arg_tys, strict=True)])
            for name, grid, *words in module.log
        ]


@instantiate_parametrized_tests
class TestGeneratedCode(RelaunchTestCase):
    def setUp(self):
        super().setUp()
        relaunch_driver.driver().library.stub_reset()
        self.enterContext(mock.patch.object(executable, "implementation", relaunch_driver.module))

    def compile(self, fn, shapes, requires_grad=False):
        with simulated_gpu(), config.patch(cudagraphs="relaunch"):
            given = [torch.randn(shape, device="cuda", requires_grad=requires_grad) for shape in shapes]
            return compile_only(fn, *given, mode="reduce-overhead", dynamic=True).wrappers

    def check_runs(self, compared, calls):
        """Two calls show the steps, and more where a number was the same, or led to other steps: here, few do."""
        for each in compared.steps:
            self.assertEqual(each.why_not, "")
            self.assertGreaterEqual(each.runs, calls - 5)

    def check(self, fn, shapes, sizes):
        """`shapes(n, m)`: those of the arguments."""
        (text,) = self.compile(fn, shapes(*sizes[0]))
        compared, parameters = Compared(self, text), arguments_of(text, shapes(*sizes[0]))
        for n, m in sizes:
            compared.call(drawn_arguments(parameters, shapes(n, m)))
        self.check_runs(compared, len(sizes))

    def check_training(self, fn, shapes, sizes):
        texts = self.compile(fn, shapes(*sizes[0]), requires_grad=True)
        forward, backward = (Compared(self, text) for text in texts)
        parameters = arguments_of(texts[0], shapes(*sizes[0]))
        for n, m in sizes:
            result, *saved = forward.call(drawn_arguments(parameters, shapes(n, m)))
            numbers = [v for v in saved if not isinstance(v, torch.Tensor)]
            tensors = [v for v in saved if isinstance(v, torch.Tensor)]
            backward.call([*numbers, *tensors, torch.randn(result.shape)])
        self.check_runs(forward, len(sizes))
        self.check_runs(backward, len(sizes))

    @parametrize("fn", list(PROGRAMS), name_fn=lambda fn: fn.__name__)
    def test_kernels_get_what_the_code_gives_them(self, fn):
        self.check(fn, PROGRAMS[fn], SIZES)

    @parametrize("fn", [training, training_with_pieces], name_fn=lambda fn: fn.__name__)
    def test_forward_and_backward(self, fn):
        self.check_training(fn, lambda n, m: [(n, m), (n, m)], SIZES)

    def check_drawn(self, seeds, trains):
        for seed in seeds:
            torch._dynamo.reset()
            scope = {"torch": torch}
            text = drawn(random.Random(seed), trains)
            exec(text, scope)
            check = self.check_training if trains else self.check
            with self.subTest(text, seed=seed):
                check(scope["fn"], lambda n, m: [(n, m), (n, m), (m,), (n,)], DRAWN_SIZES)

    @parametrize("trains", [False, True])
    def test_drawn(self, trains):
        self.check_drawn(range(3), trains)

    @form.slow
    @parametrize("trains", [False, True])
    def test_many_drawn(self, trains):
        self.check_drawn(range(100, 200), trains)
