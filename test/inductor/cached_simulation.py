"""Inductor's caches on the simulated GPU, which has none: generated code is found again, in this process or in another.

    with simulated_gpu(2) as gpu, caches(folder) as texts, SimulatedDevice(gpu):
        torch.compile(fn)(x)

Both caches and the files of generated code are in `folder`. A module that comes from a cache is executed as one that
was just generated is: by the `SimulatedDevice`, from its text, which is added to `texts`.
"""

import contextlib
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import counters
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering

import form  # noqa: F401
from torch_overlay.testing import _mocks, _stub_module


@contextlib.contextmanager
def caches(folder: str) -> Iterator[list[str]]:
    """Read and write compile caches in a folder, inside of a simulation. Yield the texts of the modules that run."""
    texts: list[str] = []
    generate, simulated = GraphLowering.compile_to_module, _mocks.inductor_config

    def execute(text: str, stub: Any) -> Any:
        texts.append(text)
        return _stub_module._execute[-1](text, stub)

    def compile_to_module(graph: Any) -> Any:
        outer = _stub_module._execute[-1]

        def write(text: str, stub: Any) -> Any:
            graph.cache_key, graph.cache_path = PyCodeCache.write(text)
            texts.append(text)
            return outer(text, stub)

        with _stub_module.executed_by(write):
            return generate(graph)

    def load(key: str, path: str, *args: Any) -> Any:
        return execute(Path(path).read_text(), types.SimpleNamespace(__file__=path))

    with contextlib.ExitStack() as stack:
        for patch in (
            mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}),
            mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
            mock.patch.object(PyCodeCache, "load_by_key_path", load),
            # Threads, and simulations inside of this one, set what the simulation sets.
            mock.patch.object(_mocks, "inductor_config", lambda: {**simulated(), "fx_graph_cache": True}),
            mock.patch("torch._functorch.aot_autograd.should_use_local_autograd_cache", lambda: True),
            torch._inductor.config.patch(fx_graph_cache=True),
        ):
            stack.enter_context(patch)
        yield texts


def lookups() -> dict[str, int]:
    """How often a cache was asked since the counters were cleared, by the answer: hit, miss or bypass."""
    names = ("fxgraph_cache_", "autograd_cache_")
    found = {**counters["inductor"], **counters["aot_autograd"]}
    answers = [name + answer for name in names for answer in ("hit", "miss", "bypass")]
    return {name: found[name] for name in answers if found.get(name)}
