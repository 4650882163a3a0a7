"""A process of the tests of caches: compiles a few programs on the simulated GPU, and says what it ran.

    main({"programs": ["training"], "folder": folder, "out": file})

The request: `programs`, `folder` of the caches, `load` and `save`, files of `torch.compiler`'s cache artifacts, `rank`,
which is the index of the current device of two, `one_rank` for `compile_on_one_rank`, `blind` for caches whose keys are
no more than numbers, `options` of the overlay that each program is run with, one after another, `off` if the overlay
is, and `out`, where the answer goes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cached_simulation import caches, lookups
from torch import nn
from torch._dynamo.utils import counters

import form
from torch_overlay import config
from torch_overlay._inductor import cache_key
from torch_overlay.analysis.race_check.simulated_device import SimulatedDevice
from torch_overlay.analysis.race_check.trace import Launch, Record, Synchronize, Wait
from torch_overlay.testing import simulated_gpu


PROGRAMS: dict[str, Callable[[], None]] = {}


def program(body: Callable[[], None]) -> Callable[[], None]:
    PROGRAMS[body.__name__] = body
    return body


def matrix(size: int = 64, grad: bool = False) -> torch.Tensor:
    return torch.randn(size, size, device="cuda", requires_grad=grad)


@program
def training() -> None:
    f = torch.compile(lambda x, w: torch.relu(x @ w).sum(0), mode="reduce-overhead")
    x, w = matrix(grad=True), matrix(grad=True)
    for _ in range(2):
        f(x, w).sum().backward()


@program
def memory_of_its_own() -> None:
    f = torch.compile(lambda: torch.ones(64, device="cuda").cumsum(0) + 1, mode="reduce-overhead")
    f()


@program
def training_on_two_streams() -> None:
    side = torch.cuda.Stream()

    @torch.compile
    def f(x, w):
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            a = torch.relu(x @ w)
        b = torch.tanh(w @ x)
        current.wait_stream(side)
        return a + b

    x, w = matrix(4096, grad=True), matrix(4096, grad=True)
    for _ in range(2):
        f(x, w).sum().backward()


@program
def stream_and_event_of_the_frame() -> None:
    @torch.compile
    def f(x, w):
        side, done = torch.cuda.Stream(), torch.cuda.Event()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a = torch.relu(x @ w)
            done.record()
        b = torch.tanh(w @ x)
        done.wait()
        return a + b

    f(matrix(4096), matrix(4096))


@program
def update_of_an_input_on_a_side_stream() -> None:
    side = torch.cuda.Stream()

    @torch.compile
    def f(x, y):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.mul_(2)
        return y.cos()

    x = matrix(2048, grad=True).clone()
    f(x, matrix(2048))
    x.sum().backward()


@program
def table_in_host_memory() -> None:
    f = torch.compile(lambda x, table: x[table] * 2, mode="reduce-overhead")
    for _ in range(2):
        f(matrix(), torch.arange(64))


@program
def partitions() -> None:
    f = torch.compile(lambda x: ((x @ x).cpu().sum(), (x @ x).relu() @ x), mode="reduce-overhead")
    f(matrix())


@program
def numbers_as_parameters() -> None:
    f = torch.compile(lambda x, n: (x * n).cumsum(0) + n, mode="reduce-overhead", dynamic=True)
    for n in (7, 8):
        f(matrix(), n)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


@program
def offload() -> None:
    model = nn.Sequential(Block(), Block(), Block(), Block()).cuda()
    x = torch.randn(8192, 1024, device="cuda", requires_grad=True)
    with config.patch(activation_offload={"budget_gb": 1.4}):
        torch.compile(model)(x).sum().backward()


def ran(device: SimulatedDevice) -> list[str]:
    """What the device and the host did, in order, without the memory."""
    kinds = Launch, Record, Wait, Synchronize
    fields = "name", "event", "stream", "streams"
    return [
        " ".join([type(each).__name__, *(str(v) for f in fields if (v := getattr(each, f, None)))])
        for each in device.trace.operations
        if isinstance(each, kinds)
    ]


def graphs(simulation: Any) -> list[str]:
    """What is known of each region that gets a graph."""
    found = [graph.get("relaunch") for graph in simulation.cudagraphs]
    return sorted(repr(dataclasses.replace(code, compile_id=None)) for code in found if code is not None)


@contextlib.contextmanager
def blind_keys(name: str) -> Iterator[None]:
    """Number the keys of a program. Upstream's have the index of the device, also for code that names none: what is
    compiled on one rank reaches others in other ways than by a cache."""
    places = "torch._inductor.codecache.compiled_fx_graph_hash", "torch._functorch._aot_autograd.autograd_cache"
    with contextlib.ExitStack() as stack:
        for kind, place in zip("fa", (places[0], f"{places[1]}.autograd_cache_key")):
            keys = (f"{kind}{name}{number}" for number in itertools.count())
            stack.enter_context(mock.patch(place, lambda *_, keys=keys, **__: (next(keys), [])))
        yield


@contextlib.contextmanager
def own_keys() -> Iterator[list[str]]:
    """Yield what the overlay adds to each key that is made inside."""
    found: list[str] = []
    make = cache_key.overlay_key

    def noted(*args: Any, **kwargs: Any) -> Any:
        key = make(*args, **kwargs)
        found.append(repr(key))
        return key

    with mock.patch.object(cache_key, "overlay_key", noted):
        yield found


def run(name: str, simulation: Any, device: SimulatedDevice, texts: list[str]) -> dict[str, Any]:
    torch._dynamo.reset()
    for kept in (counters, texts, simulation.cudagraphs, simulation.device_log):
        kept.clear()
    device.begin()
    with own_keys() as keys:
        PROGRAMS[name]()
    unnamed = sorted(re.sub(r"# kernel path: .*", "", text) for text in texts)
    found = {"lookups": lookups(), "texts": unnamed, "ran": ran(device), "graphs": graphs(simulation)}
    found["own keys"] = keys if found["lookups"].get("autograd_cache_miss") else []  # a hit makes fewer
    return found | {"devices": [line for line in simulation.device_log if line.startswith("set device")]}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    if not form.PATCHED:
        assert form.overlay.status().enabled is not bool(request.get("off"))
    one_rank = torch.compiler.config.patch(compile_on_one_rank=bool(request.get("one_rank")))
    found: dict[str, Any] = {}
    with simulated_gpu(2) as simulation, caches(request["folder"]) as texts, SimulatedDevice(simulation) as device:
        torch.cuda.set_device(request.get("rank", 0))
        if "load" in request:
            torch.compiler.load_cache_artifacts(Path(request["load"]).read_bytes())
        with one_rank:
            for name in request["programs"]:
                with blind_keys(name) if request.get("blind") else contextlib.nullcontext():
                    found[name] = run(name, simulation, device, texts)
            for options in request.get("options", ()):
                with config.patch(options):
                    found[json.dumps(options)] = [
                        run(name, simulation, device, texts)["lookups"] for name in request["programs"]
                    ]
        saved = torch.compiler.save_cache_artifacts() if "save" in request else None
        if saved is not None:
            Path(request["save"]).write_bytes(saved[0])
            found["keys"] = {kind: sorted(keys) for kind, keys in saved[1].artifacts.items()}
    return found


def main(request: dict[str, Any]) -> None:
    Path(request["out"]).write_text(json.dumps(answer(request)))
