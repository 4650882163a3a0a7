"""Compiles programs with streams for AOTInductor and for FX wrappers on a simulated GPU, and keeps the text."""

import contextlib
import json
import logging
import operator
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._inductor import codecache
from torch._inductor.codegen.cpp_wrapper_gpu import DeferredTritonCallWrapper
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._subclasses.fake_tensor import unset_fake_temporarily

import form  # noqa: F401
from torch_overlay.testing import compile_only, simulated_gpu


class Branch(torch.nn.Module):
    """A branch on a side stream. The caller's stream is an attribute, too, and the first event has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = torch.cuda.current_stream(), torch.cuda.Stream()
        self.ready = self.begun = torch.cuda.Event()
        self.done = torch.cuda.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        self.ready.record(self.main)
        self.begun.wait(self.side)
        with torch.cuda.stream(self.side):
            z = (y * 1).softmax(-1)
            self.done.record()
        w = y.relu().sum(0)
        self.done.wait()
        return z + w


class OneStream(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        event = torch.cuda.Event()
        y = x.relu().sum(0)
        event.record()
        event.wait()
        return y @ x


def write_source(call: DeferredTritonCallWrapper, wrapper: Any) -> None:
    """Write a kernel's source, as wrappers do that compile it when they run."""
    source = wrapper._kernel_name_to_body[call.kernel_name]
    wrapper.prefix.splice(f'static const char* {call.kernel_name}_source = R"TRITON({source})TRITON";')


@contextlib.contextmanager
def texts() -> Iterator[list[str]]:
    """The text that is generated inside for AOTInductor; neither that nor the kernels are compiled."""
    found: list[str] = []

    def keep(graph: Any, wrapper: str, *args: Any, **kwargs: Any) -> str:
        found.append(wrapper)
        return "not_compiled.so"

    with (
        torch._inductor.config.patch({"triton.autotune_at_compile_time": True}),  # as if there were a GPU
        mock.patch.object(codecache.AotCodeCompiler, "compile", keep),
        mock.patch.object(PythonWrapperCodegen, "generate_and_run_autotune_block"),
        mock.patch.object(DeferredTritonCallWrapper, "generate", write_source),
        mock.patch("torch._inductor.graph.is_same_tensor", operator.is_),  # weights have no addresses
    ):
        yield found


def aot_inductor(model: type[torch.nn.Module], size: int = 64) -> str:
    with simulated_gpu():
        return package(model(), torch.empty(size, size, device="cuda"))


def package(model: torch.nn.Module, *inputs: torch.Tensor) -> str:
    """The C++ of a model's package."""
    with texts() as found, torch.no_grad():
        program = torch.export.export(model, inputs, strict=True).module()
        mode = program.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode  # the exported program has its own

        def of_program(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

        with unset_fake_temporarily(), mode:
            inputs = tuple(map(of_program, inputs))
            for weights, kind in ((program._parameters, torch.nn.Parameter), (program._buffers, torch.nn.Buffer)):
                weights.update((name, kind(of_program(weight))) for name, weight in weights.items())
        with unset_fake_temporarily():
            torch._inductor.aot_compile(program, inputs)
    return found[0]


def compiled(model: type[torch.nn.Module], options: dict[str, Any], backward: bool = False) -> str:
    """The text of the wrappers, or the first line of the error."""
    with simulated_gpu():
        x = torch.empty(64, 64, device="cuda", requires_grad=backward)
        seen = compile_only(model(), x, options=options, backward=backward, allow_error=True)
    return "\n".join(seen.wrappers) if seen.error is None else str(seen.error).partition("\n")[0]


def everything() -> dict[str, str]:
    with torch._inductor.config.patch(fx_wrapper=True):
        return {
            "several streams": compiled(Branch, {}),
            "one stream": compiled(OneStream, {}),
            "a backward": compiled(OneStream, {}, backward=True),
        }


if __name__ == "__main__":
    logging.disable()
    print(json.dumps(everything()))
