"""Silent bugs of stock PyTorch 2.15.0 in the backward of a forward with streams, each as a check.

A check compiles a small training step on a simulated GPU and returns what is wrong with it, in words; with the overlay
that is nothing. On stock most training steps with streams don't compile at all, and the silent bugs are after the
loud ones: `mend` repairs two of those, so that the checks can say on stock what they are for. Run as a script, the
module prints what each check finds.
"""

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo
from torch._functorch._aot_autograd import runtime_wrappers


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import form  # noqa: F401
from torch_overlay import config
from torch_overlay.testing import compile_only, Compiled, observe, simulated_gpu
from user_kernels import scaled_into


def mend() -> None:
    """Let stock compile the two branches: its memory timeline asserts that each saved tensor has a reader that isn't an
    ordering edge, and its search for free places asks every node for a value.
    """
    import torch._functorch._aot_autograd.streams as streams
    import torch._inductor.memory as memory

    freeable, device = memory.get_freeable_input_buf, streams.get_device

    def with_readers(*args: Any) -> Any:
        return {name: b for name, b in freeable(*args).items() if b.mpi_buffer.succ_nodes}

    def device_or_current(node: Any) -> torch.device:
        return device(node) if isinstance(node.meta.get("val"), torch.Tensor) else torch.device("cuda", 0)

    for module in list(sys.modules.values()):
        if getattr(module, "get_freeable_input_buf", None) is freeable:
            module.get_freeable_input_buf = with_readers  # type: ignore[attr-defined]
    streams.get_device = device_or_current


def _compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiled as in a process that has compiled nothing."""
    torch._dynamo.reset()
    return torch.compile(fn, **options)


def _square(n: int = 64) -> torch.Tensor:
    return torch.randn(n, n, device="cuda", requires_grad=True)


def _layer_on(side: torch.Stream, backend: Any = "inductor") -> Callable[..., Any]:
    """All of it is on the side stream, and joined in the end. Stock compiles this one."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(side):
            y = (x @ x).relu() @ x
        torch.cuda.current_stream().wait_stream(side)
        return y

    return torch.compile(forward, backend=backend)


def _two_branches() -> Compiled:
    side = torch.cuda.Stream()

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a = (x @ weight).relu()
        b = (x * 2).relu()
        torch.cuda.current_stream().wait_stream(side)
        return (a * b).sum()

    with observe() as seen:
        _compiled(forward)(_square(), _square()).backward()
    return seen


def _wrapper(seen: Compiled, kind: str) -> str:
    (found,) = [r.wrapper for r in seen.regions if r.kind == kind]
    assert found is not None
    return found


@simulated_gpu()
def stale_streams() -> list[str]:
    """S1: each backward runs on the streams of the first frame that the process compiled."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.graph_bytecode_inputs import get_external_object_by_index

    torch._dynamo.reset()
    found: list[int] = []

    def run_forward(gm: Any, _: Any) -> Any:
        return make_boxed_func(gm)

    def run_backward(gm: Any, _: Any) -> Any:
        def run(args: list[Any]) -> Any:
            found.append(get_external_object_by_index(1).stream_id)  # type: ignore[attr-defined]
            values, args[:] = list(args), []
            return gm(*values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    sides = [torch.cuda.Stream() for _ in range(3)]
    backend = aot_autograd(fw_compiler=run_forward, bw_compiler=run_backward)
    losses = [_layer_on(side, backend)(_square()).sum() for side in sides]
    for loss in losses:
        loss.backward()
    return [f"the backward on stream {s.stream_id} ran on {f}" for s, f in zip(sides, found) if s.stream_id != f]


@simulated_gpu()
def donated_duplicates() -> list[str]:
    """S3: a buffer that is saved under two names is written over before it is read by its second one."""
    seen = _two_branches()
    outputs = re.findall(r"\n +return \((.*?),? *\)", _wrapper(seen, "forward"))[-1]
    names = [n.strip() for n in re.split(r",(?![^(]*\))", outputs)]
    backward = _wrapper(seen, "backward")
    (inputs,) = re.findall(r"\n +(.*?) = args\n", backward)
    saved = [n.strip() for n in inputs.split(",") if n.strip() and "tangents" not in n]
    memory = dict(zip(saved, names[-len(saved) :]))
    written = re.findall(r" = (\w+); del \w+  # reuse", backward)
    return [
        f"{name} is written over, and {other} is the same memory"
        for name in written
        for other in saved
        if other != name and name in memory and memory[other] == memory[name]
    ]


@simulated_gpu()
def unjoined_gradients() -> list[str]:
    """S4: nobody waits for a gradient that a side stream computes."""
    torch._dynamo.reset()
    with observe() as seen:
        _layer_on(torch.cuda.Stream())(_square()).sum().backward()
    text = _wrapper(seen, "backward")
    last = max(text.rfind(launch) for launch in ("with stream1:", "set_stream(stream1)", "stream=stream1_raw"))
    waits = r"wait_event\.default\(\d+, 0\)|wait_stream\.default\(0, \d+\)|ev\d+\.wait\(stream0_raw\)"
    return [] if re.search(waits, text[last:]) else ["the current stream waits for nothing after it"]


@simulated_gpu()
def streams_by_other_numbers() -> list[str]:
    """S5: the current stream is registered anew for each synchronisation, and a capture refreshes number 0 alone."""
    text = _wrapper(_two_branches(), "backward")
    named = re.findall(r"(?:record_event|wait_event|sync_dealloc)\.default\(\d+, (\d+)", text)
    named += re.findall(r"'stream\d+': (\d+)", text)
    return [f"stream {number} of a program with streams 0 and 1" for number in sorted(set(named) - {"0", "1"})]


def saved_numbers() -> list[str]:
    """Not of the list: a number that autograd saved has no value for compiled code in its first call."""
    saved = (torch.ones(1, requires_grad=True) * 2).grad_fn._saved_other  # type: ignore[union-attr]
    with runtime_wrappers._AnalyzeCustomOpInputOutputMode():
        try:
            return [] if saved.item() == 2 else ["another number"]
        except RuntimeError as error:
            return [str(error).splitlines()[0]]


def inputs_saved_and_written() -> list[str]:
    """The backward computes a factor again, from an input that the forward has written to by then."""

    def whole(x: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        a = (cache * 2) * weight
        cache.mul_(3)
        return (a * x).sum()

    def view(x: torch.Tensor, cache: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        a = (cache.t()[:2] * 2) * weight[:2]
        cache.mul_(3)
        return (a * x[:2]).sum()

    wrong = []
    for function in (whole, view):
        gradients = []
        for run in (function, torch.compile(function, dynamic=False)):
            weight = torch.ones(4, 4, requires_grad=True)
            run(torch.ones(4, 4), torch.ones(4, 4), weight).backward()
            gradients.append(weight.grad)
        if not torch.equal(*gradients):
            wrong.append(f"{function.__name__}: {gradients[1].max():.0f} instead of {gradients[0].max():.0f}")
    return wrong


def _matmuls_to_the_host(joint: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        node.meta["should_offload"] = True
    return joint


@torch.library.custom_op("overlay_bugs::add_to", mutates_args={"target"})
def add_to(target: torch.Tensor, x: torch.Tensor) -> None:
    target.add_(x)


def read_behind_the_write() -> list[str]:
    """What was computed from a value is computed from the one that a custom operator put in its place."""

    def whole(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = x + x.sin()
        before = total + 1
        add_to(total, x)
        return before + weight, total

    def view(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = x + x.sin()
        before = total + 1
        add_to(total[1:3], x[1:3])
        return before + weight, total

    def twice(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total, other = x + x.sin(), x + x.cos()
        before, later = total + other, other + 1
        add_to(total, other)
        after = total * 2
        add_to(other, total)
        return before + weight, later + weight, after + weight, total, other

    wrong = []
    x, weight = torch.arange(4.0), torch.zeros(4, requires_grad=True)
    for function in (whole, view, twice):
        expected, found = function(x, weight), _compiled(function)(x, weight)
        wrong += [
            f"{function.__name__}: {[*b.tolist()]} instead of {[*a.tolist()]}"
            for a, b in zip(expected, found)
            if not torch.allclose(a, b)
        ]
    return wrong


def written_through_other_types() -> list[str]:
    """A custom operator that writes to a view in a different type leaves numbers where it wrote bits. On a GPU, so it
    does if it gets the whole, and so does a user's kernel: they are to get the value's own memory, and no copies."""

    def part(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).half()
        add_to(y.view(torch.int16)[1:3], torch.ones(2, dtype=torch.int16))
        return y

    def whole(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        add_to(y.view(torch.int32), x.view(torch.int32))
        return y

    def kernel(x: torch.Tensor) -> torch.Tensor:
        y = (x * 2).to(torch.float8_e4m3fn)
        scaled_into(y.view(torch.uint8), y.view(torch.uint8), 1)
        return y.float() + 1

    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    wrong = [] if torch.equal(part(x), _compiled(part)(x)) else ["part"]
    for function, values in ((whole, 1), (kernel, 2)):
        with simulated_gpu():
            (text,) = compile_only(function, torch.randn(64, device="cuda")).wrappers
        wrong += [function.__name__] * (text.count("= empty_strided_cuda(") != values)
    return wrong


def results_that_are_inputs() -> list[str]:
    """What adds zero or multiplies by one is removed: its result is what it was given."""

    def sums(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.zeros_like(x) + x,)

    def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ones_like(x).view(2, 2) * x.view(2, 2), x - torch.zeros_like(x)

    def results(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin()
        return y, y + torch.zeros_like(x), torch.ones_like(x) * y

    def updates(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x[1:3].mul_(2)
        return (torch.zeros_like(x) + x,)

    def puts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.slice_scatter(x, torch.ones(2), 0, 0, 2)
        x.copy_(y)
        return (y,)

    def lists(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch._foreach_mul_([x], 2)
        return (x.clone(),)

    def product(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight = x.clone().requires_grad_()
        with torch.enable_grad():
            y = _compiled(lambda w: w * torch.ones_like(w), backend="inductor")(weight)
        return y.detach(), weight.detach()

    constant = torch.ones(4)

    def constants(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return constant, constant * torch.ones_like(x), x + 1

    found = []
    for function in (sums, views, results, updates, puts, lists, product, constants):
        x = torch.arange(4.0)
        made = (function if function is product else _compiled(function))(x)
        memory = [t.untyped_storage().data_ptr() for t in (x, *made)]
        if len(set(memory)) < len(memory):
            found.append(f"{function.__name__}: {len(memory)} tensors in {len(set(memory))} memories")
    return found


def views_of_what_takes_no_computing() -> list[str]:
    """A result and views of it are one memory, and no input's."""

    def sums(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.zeros_like(x) + x
        return y, y.view(2, 2)

    def products(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * torch.ones_like(x)
        return y[1:], y.view(2, 2).t(), y

    def updates(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x[0:2].add_(1)
        y = x.clone()
        z = y[1:]
        x[2:3].mul_(2)
        return z, y

    def puts(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.slice_scatter(x, torch.ones(2), 0, 0, 2)
        x.copy_(y)
        return y.view(2, 2), y[1:].split(1)[1], y

    found = []
    for function in (sums, products, updates, puts):
        x, same = torch.arange(4.0), torch.arange(4.0)
        expected, made = function(same), _compiled(function)(x)
        if not all(torch.equal(a, b) for a, b in zip(expected, made)):
            found.append(f"{function.__name__}: {made} in the place of {expected}")
        memory = {t.untyped_storage().data_ptr() for t in made}
        if len(memory) > 1 or x.untyped_storage().data_ptr() in memory:
            found.append(f"{function.__name__}: a result, its views and the input in {len(memory)} memories")
    return found


def updates_of_what_is_kept() -> list[str]:
    """A part of an input is updated, what it was then is kept, and goes on to change with the input."""

    def copied(x: torch.Tensor) -> torch.Tensor:
        x[1:3].mul_(2)
        y = x.clone()
        x[0:1].add_(1)
        return y

    def checked(x: torch.Tensor) -> torch.Tensor:
        def step(x: torch.Tensor) -> torch.Tensor:  # has an effect, too
            torch.ops.aten._linalg_check_errors(torch.zeros((), dtype=torch.int32), "checked", is_matrix=True)
            y = torch.slice_scatter(x, x[1:3] * 2, 0, 1, 3)
            x.copy_(y)
            return y

        y = _compiled(step)(x)
        x.zero_()
        return y

    def put(x: torch.Tensor) -> torch.Tensor:
        x.index_put_((torch.tensor([1]),), torch.tensor([7.0]))
        y = x.clone()
        x.index_put_((torch.tensor([0]),), torch.tensor([7.0]))
        return y

    def computed(x: torch.Tensor) -> torch.Tensor:
        x[0:2].add_(3)
        y = x * torch.ones_like(x)
        x.mul_(2)
        return y

    def saved(x: torch.Tensor) -> torch.Tensor:
        weight = torch.ones(4, requires_grad=True)

        def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            x[0:1].add_(1)
            return (w * x).sin()

        _compiled(step)(weight, x).sum().backward()
        return x.clone()

    def listed(x: torch.Tensor) -> torch.Tensor:
        weight = torch.ones(4, requires_grad=True)

        def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            torch._foreach_add_([x], 1)
            return (w * x).sin()

        _compiled(step)(weight, x).sum().backward()
        return x.clone()

    found = []
    right = {
        copied: [0.0, 2, 4, 3],
        checked: [0.0, 2, 4, 3],
        put: [0.0, 7, 2, 3],
        computed: [3.0, 4, 2, 3],
        saved: [1.0, 1, 2, 3],
        listed: [1.0, 2, 3, 4],
    }
    for function, expected in right.items():
        x = torch.arange(4.0)
        got = (function if function in (checked, saved, listed) else _compiled(function))(x).tolist()
        if got != expected:
            found.append(f"{function.__name__}: {got} in the place of {expected}")
    return found


@simulated_gpu()
def concatenated_in_partitions() -> list[str]:
    """Each of two graph partitions allocates the concatenation that it computes a part of."""

    def matmuls(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x @ x, (x + 1).cpu().cuda() @ x])

    def nested(x: torch.Tensor) -> torch.Tensor:
        first = torch.cat([x @ x, x.t() @ x])
        return torch.cat([first, (x + 1).cpu().cuda() @ x, x.sin() @ x])

    def read(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        part, other = x @ x, (x + 1).cpu().cuda()
        return torch.cat([part, other @ x]), part @ other

    found = []
    for function, parts in ((matmuls, 2), (nested, 4), (read, 2)):
        with observe() as seen:
            _compiled(function, mode="reduce-overhead")(_square().detach())
        names = _allocations(_wrapper(seen, "inference"), 64 * parts)
        found += [f"{function.__name__}: {b} is {a} again" for a, b in itertools.pairwise(names)]
    return found


def _allocations(text: str, rows: int) -> list[str]:
    """The names of the buffers of that many rows, once for each time that one is allocated."""
    return re.findall(rf"(\w+) = empty_strided_cuda\(\({rows}, 64\)", text)


@simulated_gpu()
def device_of_a_partition() -> list[str]:
    """A partition uses a variable of the function that calls it."""

    def partitioned(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return (x[table] * 2).sum(0), torch.relu(x) + 1

    one_rank = torch.compiler.config.patch(compile_on_one_rank=True)
    with observe() as seen, one_rank, config.patch(cudagraph_rewrites=False):
        _compiled(partitioned, mode="reduce-overhead")(_square().detach(), torch.arange(8))
    text = _wrapper(seen, "inference")
    functions = re.split(r"^ *def ", text, flags=re.MULTILINE)[1:]
    if not any(function.startswith("partition_") for function in functions):
        return ["there is no partition"]
    name = "_coor_device_idx"
    return [f.partition("(")[0] for f in functions if name in f and f"{name} = " not in f]


@simulated_gpu()
def views_of_what_is_concatenated() -> list[str]:
    """What a concatenation is made of is computed in it, though a view of that is another result."""

    def viewed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return torch.cat([y, x]), y.view(32, 128)

    def filled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.mul(x, 2, out=torch.empty_like(x))
        return torch.cat([x, y])[32:], y[:32]

    found = []
    for function in (viewed, filled):
        with observe() as seen:
            _compiled(function)(_square().detach())
        if not _allocations(_wrapper(seen, "inference"), 64):
            found.append(f"{function.__name__}: the second result lies in the first")
    return found


@simulated_gpu()
def constants_on_the_host() -> list[str]:
    """With CUDA graphs, constants that a program makes on the host, and returns, come on the GPU."""

    def constants(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ones = torch.ones(64)
        return x + 1, ones, ones * 2

    def number(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        half = torch.full((), 0.5)
        return x * half, half

    def download(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = torch.zeros_like(x).cpu()
        return x + 1, zeros

    found = []
    for function in (constants, number, download):
        results = _compiled(function, mode="reduce-overhead")(_square().detach())
        found += [f"{function.__name__}: result {i} is on {r.device}" for i, r in enumerate(results) if i and r.is_cuda]
    return found


@simulated_gpu()
def pinned_buffers() -> list[str]:
    """With CUDA graphs, a pinned buffer that a program makes, fills and copies back is an error."""

    def empty(x: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(x.shape, pin_memory=True)
        buffer.copy_(x * 2, non_blocking=True)
        return buffer.to(x.device, non_blocking=True) + 1

    def zeros(x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros_like(x, device="cpu", pin_memory=True).to(x.device)

    found = []
    for function in (empty, zeros):
        try:
            _compiled(function, mode="reduce-overhead")(_square().detach())
        except torch._inductor.exc.InductorError as error:
            found.append(f"{function.__name__}: {str(error).splitlines()[0]}")
    return found


@simulated_gpu()
def offloaded_storage() -> list[str]:
    """S8: a tensor whose copy to the host has a stream of its own loses its storage before it is read."""

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        return (torch.relu(y) + torch.sin(y)).sum()

    options = {"enable_activation_offloading": True, "activation_offload_separate_stream": True}
    options["joint_custom_pass"] = _matmuls_to_the_host
    with observe() as seen, torch._functorch.config.patch(options):
        _compiled(forward)(_square(), _square()).backward()
    text = _wrapper(seen, "forward")
    if "ao.offload" not in text and "copy_out" not in text:
        return ["nothing goes to the host"]
    found = []
    for wait in re.finditer(r"wait_tensor\.default\(\w+, (\w+)", text):
        name = wait[1]
        later = re.search(rf"^ *(?!del ).*\b{name}\b.*$", text[wait.end() :], re.MULTILINE)
        if later is not None:
            found.append(f"the storage of {name} is gone, and then: {later[0].strip().split('(')[0]}")
    return found


def recorded_lazy_views() -> list[str]:
    """`record_stream` of a lazy view records the stream for a copy, and raises; generated code has such calls."""
    import torch._inductor.codegen.wrapper  # what generated code needs is registered with it

    recorded: list[int] = []
    library = torch.library.Library("aten", "IMPL")  # noqa: TOR901
    library.impl("record_stream", lambda tensor, stream: recorded.append(tensor.data_ptr()), "CPU")
    number, found = torch.randn(4, dtype=torch.complex64), []
    zeros = torch._efficientzerotensor((4,))
    views = {"plain": number, "conjugate": number.conj(), "negative": number.conj().imag, "zeros": zeros}
    try:
        for name, view in views.items():
            try:
                view.record_stream(torch.Stream(device="cpu"))
            except RuntimeError as error:
                found.append(f"{name}: {error}")
            if recorded[-1:] != [view.data_ptr()]:
                found.append(f"{name}: other memory")
    finally:
        library._destroy()
    return found


def numbers_drawn_again() -> list[str]:
    """Under a budget of memory the backward computes with other random numbers than the forward."""
    F = torch.nn.functional

    def dropout(y: torch.Tensor) -> torch.Tensor:
        return F.dropout(y, 0.5)

    def bernoulli(y: torch.Tensor) -> torch.Tensor:
        return (y * torch.bernoulli(torch.full_like(y, 0.5))).sin()

    def permutation(y: torch.Tensor) -> torch.Tensor:
        return y[:, torch.randperm(16)].sin()

    def rrelu(y: torch.Tensor) -> torch.Tensor:
        return F.rrelu(y, training=True).sin()

    def attention(y: torch.Tensor) -> torch.Tensor:
        y = y.view(1, 2, 8, 16)
        return F.scaled_dot_product_attention(y, y, y, dropout_p=0.5).view(16, 16)

    def branch(y: torch.Tensor) -> torch.Tensor:
        return torch.cond(y.sum() > -1e9, dropout, torch.sin, (y,))

    def gradients(between: Callable[..., torch.Tensor], **options: Any) -> list[Any]:
        torch.manual_seed(1)
        inputs = [torch.randn(16, 16).requires_grad_() for _ in range(3)]
        with torch._functorch.config.patch(options):
            loss = _compiled(lambda x, v, w: between(x @ v) @ w, backend="aot_eager", fullgraph=True)(*inputs).sum()
            loss.backward()
        return [loss, *(x.grad for x in inputs)]

    found = []
    for between in (dropout, bernoulli, permutation, rrelu, attention, branch):
        right = gradients(between)
        cases: list[dict[str, Any]] = [{"activation_memory_budget": budget} for budget in (0.5, 0.1, 0.0)]
        for options in (*cases, {"aggressive_recomputation": True}):
            if not all(map(torch.equal, right, gradients(between, **options))):
                found.append(f"{between.__name__}: other gradients with {options}")
    return found


def kernels_of_one_name() -> list[str]:
    """A C++ wrapper loads the binary of a kernel that another wrapper has launched before, after a different kernel
    with its name.
    """
    import triton
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.runtime.triton_lazy_compile import run_triton_kernel_with_autotune

    nothing = dict.fromkeys(("def_args", "call_args", "global_scratch", "profile_scratch"))
    unset = dict.fromkeys(
        ("_cached_launcher", "_profiler_ctx", "_debug_call", "dump_launch_params", "triton_interpret")
    )

    def kernel(binary: bytes) -> CachingAutotuner:
        metadata = {"num_warps": 4, "shared": 0}
        compiled = SimpleNamespace(metadata=SimpleNamespace(name="k"), **metadata, asm={"cubin": binary})
        launcher: Any = mock.Mock(bin=compiled, config=triton.Config({}), store_cubin=True, cache_hash="k", **nothing)
        made: Any = object.__new__(CachingAutotuner)
        made.__dict__.update(unset, launchers=[launcher], triton_meta={}, _plugins=[], _cache_eligible=True)
        made.__dict__.update(dump_launch_params=False, dump_launch_tensors=False)
        made.device_props = SimpleNamespace(type="cuda")
        made.inductor_meta = {"kernel_name": "k", "use_fast_triton_launcher": False}
        return made

    kernels, found = {b"one": kernel(b"one"), b"other": kernel(b"other")}, []
    for wanted in (*kernels, *kernels):  # the first call of a wrapper each
        loaded = Path(run_triton_kernel_with_autotune({"k": kernels[wanted]}, "k", 0, []).cubin_path).read_bytes()
        found += [f"{loaded!r} in place of {wanted!r}"] if loaded != wanted else []
    return found


CHECKS = (
    kernels_of_one_name,
    stale_streams,
    donated_duplicates,
    unjoined_gradients,
    streams_by_other_numbers,
    offloaded_storage,
    saved_numbers,
    inputs_saved_and_written,
    read_behind_the_write,
    written_through_other_types,
    concatenated_in_partitions,
    device_of_a_partition,
    views_of_what_is_concatenated,
    constants_on_the_host,
    results_that_are_inputs,
    views_of_what_takes_no_computing,
    updates_of_what_is_kept,
    recorded_lazy_views,
    pinned_buffers,
    numbers_drawn_again,
)


if __name__ == "__main__":
    mend()
    print(json.dumps({check.__name__: check() for check in CHECKS}))
