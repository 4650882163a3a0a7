"""Lists every mock of the simulated GPU, each with its reason. `simulated_gpu` enters all of them, and leaves them in
reverse.

A mock replaces an attribute. The lower its level, the fewer mocks are needed: Python's `torch.cuda.*` functions stay
what they are (Dynamo also knows them by identity), and only the C functions that they call are replaced. Streams,
events and guards are in `_native.py` and `_device.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pkgutil
from collections import Counter
from types import FunctionType
from typing import Any, TYPE_CHECKING
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes, TorchDispatchMode

from torch_overlay.testing import _device
from torch_overlay.testing._fake_ops import NotSimulated
from torch_overlay.testing._stub_module import stub_module


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch_overlay.testing._device import Devices
    from torch_overlay.testing._fake_ops import SimulatedTensorMode


@dataclasses.dataclass(frozen=True)
class Mock:
    target: str
    replacement: Any
    why: str
    create: bool = False

    def __post_init__(self) -> None:
        # A mock that ends up in a graph prints as the function that it replaces.
        if isinstance(self.replacement, FunctionType) and self.replacement.__name__ == "<lambda>":
            self.replacement.__module__, _, name = self.target.rpartition(".")
            self.replacement.__name__ = self.replacement.__qualname__ = name

    def patch(self) -> contextlib.AbstractContextManager[Any]:
        owner, _, name = self.target.rpartition(".")
        return mock.patch.object(_resolved(owner), name, self.replacement, create=self.create)


_resolved = functools.cache(pkgutil.resolve_name)  # of a hundred owners, each time that a simulation is entered


def _calls(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a new function for every mock: Dynamo keeps its handlers in a table keyed by the function object."""
    return lambda *args, **kwargs: fn(*args, **kwargs)


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _no_cuda_graph(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.cuda.CUDAGraph: there is no GPU to capture on in simulated_gpu(). torch_overlay.analysis.check(fn, "
        "*args) checks the function that is to be captured; torch_overlay.analysis.check_graph reads a graph that was "
        "captured on a GPU"
    )


def device_mocks(d: Devices) -> list[Mock]:
    """Return the mocks of what PyTorch asks the CUDA runtime for."""
    current = "the device of this thread is kept by c10's fake guard, not by the CUDA runtime"
    streams = "streams of this thread are kept by c10's fake guard, not by c10::cuda"
    properties = _returns(_device.H200)
    exchange, maybe_exchange = _calls(d.exchange_device), _calls(d.exchange_device)
    interface = "torch._dynamo.device_interface.CudaInterface"
    variable = "torch._dynamo.variables.ctx_manager.CUDADeviceVariable"
    return [
        Mock("torch._C._cuda_getDeviceCount", _returns(d.count), "asks the runtime, which asks the driver"),
        Mock("torch.cuda._cached_device_count", d.count, "device_count() would ask NVML; this is its own cache"),
        Mock("torch.cuda._initialized", True, "initialising asks the driver; nothing here needs it"),
        Mock("torch.cuda._get_device_properties", properties, "set by the C initialisation", create=True),
        Mock(
            "torch.cuda.default_generators",
            tuple(_device.Generator(i) for i in range(d.count)),
            "set by the C initialisation; Dynamo and AOTAutograd save and restore their state",
        ),
        Mock("torch._C._cuda_getDevice", _calls(_device._get_device), current),
        Mock("torch._C._cuda_setDevice", _calls(d.set_device), current),
        Mock("torch._C._cuda_exchangeDevice", exchange, current),
        Mock("torch._C._cuda_maybeExchangeDevice", maybe_exchange, current),
        Mock("torch.cuda._exchange_device", exchange, "alias taken at import"),
        Mock("torch.cuda._maybe_exchange_device", maybe_exchange, "alias taken at import"),
        Mock(f"{interface}.exchange_device", staticmethod(exchange), "alias, too"),
        Mock(f"{interface}.maybe_exchange_device", staticmethod(maybe_exchange), "alias"),
        Mock(f"{variable}._exchange_fn", staticmethod(exchange), "alias"),
        Mock(f"{variable}._maybe_exchange_fn", staticmethod(maybe_exchange), "alias"),
        Mock("torch._C._cuda_hasPrimaryContext", _calls(d.has_context), "asks the driver"),
        Mock("torch._C._cuda_getCurrentStream", _calls(d.stream_data), streams),
        Mock("torch._C._cuda_getDefaultStream", _calls(d.default_stream_data), streams),
        Mock("torch._C._cuda_getCurrentRawStream", raw := _calls(d.raw_stream), streams),
        Mock(f"{interface}.get_raw_stream", staticmethod(raw), "alias taken at import"),
        Mock("torch._C._cuda_setStream", _calls(d.set_stream_by_id), streams),
        Mock("torch._C._accelerator_setStream", _calls(d.set_stream), "native, but it must be logged"),
        Mock("torch._C._cuda_memoryStats", _returns({}), "asks c10's allocator, which has no such device"),
        Mock("torch._C._cuda_resetPeakMemoryStats", _returns(None), "asks c10's allocator"),
        Mock("torch._C._cuda_isCurrentStreamCapturing", _returns(False), "asks the runtime"),
        Mock("torch.cuda.graphs._cuda_isCurrentStreamCapturing", _returns(False), "alias taken at import"),
        Mock("torch.cuda.graphs.CUDAGraph.__new__", staticmethod(_no_cuda_graph), "asks the driver"),
        Mock("torch._C._cuda_synchronize", _calls(d.synchronize), "asks the runtime, and must be logged"),
        Mock("torch._C._accelerator_synchronizeDevice", _calls(d.synchronize), "the fake guard can't; logged"),
        Mock("torch._C._cuda_sleep", lambda cycles: d.log.note("sleep"), "launches a kernel"),
        Mock("torch.accelerator.device_count", _returns(d.count), "counts devices through c10::cuda"),
    ]


def tensor_mocks(mode: SimulatedTensorMode) -> list[Mock]:
    """Return the mocks for code in which fake tensors alone can't replace real ones."""
    swap = torch.utils.swap_tensors

    def swap_fakes(first: torch.Tensor, second: torch.Tensor) -> None:
        mode.forget(first)
        mode.forget(second)
        swap(first, second)

    deepcopy = torch.Tensor.__deepcopy__

    def deepcopy_fake(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
        if type(tensor) is torch.Tensor:  # with data, from outside
            with _disable_current_modes():
                return deepcopy(tensor, memo)
        is_ours = getattr(tensor, "fake_mode", None) is mode and tensor.is_leaf and tensor.layout == torch.strided
        return mode.deepcopy(tensor, memo) if is_ours else deepcopy(tensor, memo)

    fallback = torch._subclasses.fake_tensor.run_fallback_kernel

    def fall_back(fake_mode: Any, func: Any, args: Any, spec: Any, error: Any) -> Any:
        if any(isinstance(a, torch.Tensor) and a.device.type == "cuda" for a in args):
            if func._schema.returns:
                raise NotSimulated(func) from error
            return None  # it writes to what it gets, and no result has a shape to be known
        return fallback(fake_mode, func, args, spec, error)

    engine = torch.autograd.graph._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return engine(*args, **kwargs)

    return [
        Mock(
            "torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init",
            True,
            "what every fake mode finds by itself on a machine without a GPU: never copy a constant to the device",
        ),
        Mock(
            "torch.autograd._engine_run_backward",
            run_backward,
            "the engine has as many device threads as there were devices when it started: use the calling thread",
        ),
        Mock(
            "torch.Tensor.__deepcopy__",
            deepcopy_fake,
            "asks for the address, and copies a storage without data and the attributes, the fake mode among them",
        ),
        Mock(
            "torch._subclasses.fake_tensor.run_fallback_kernel",
            fall_back,
            "runs an operator without a fake kernel on the device",
        ),
        Mock(
            "torch.utils.swap_tensors",
            swap_fakes,
            "module.cuda(): the mode's memo holds fake parameters weakly, which forbids it",
        ),
    ]


class SimulatedRunner:
    """Stands for a `Runner`: runs the region as compiled, and counts as if all calls had been by a graph: one at least,
    and but for the first call of each further size, if the region calls operators."""

    def __init__(self, record: Callable[..., Any], model: Callable[[list[Any]], Any], code: Any) -> None:
        from torch_overlay._inductor.relaunch.governor import Governor
        from torch_overlay._inductor.relaunch.states import CallKeys

        self.model, self.code, self.compiled = model, code, None
        self.governor, self.keys = Governor(), CallKeys(code)
        self.outside: Counter[str] = Counter()
        self.refusals: dict[str, Any] = {}
        self.calls, self.sizes = 0, set[Any]()
        record(
            model,
            device_index=code.device,
            is_backward=code.is_backward,
            mutated_input_idxs=code.mutated_inputs,
            relaunch=code,
            runner=self,
        )

    def __call__(self, inputs: list[Any]) -> Any:
        sizes = tuple(tuple(map(int, i.shape)) if isinstance(i, torch.Tensor) else i for i in inputs)
        is_new, self.calls = sizes not in self.sizes, self.calls + 1
        self.outside["warm-up"] += bool(is_new and self.sizes and getattr(self.model, "calls_operators", False))
        self.sizes.add(sizes)
        return self.model(inputs)

    def launched(self) -> int:
        return max(1, self.calls - self.outside["warm-up"])

    def graphs(self) -> list[Any]:
        from torch_overlay._inductor.relaunch.launch.relaunch import Graph

        return [Graph(launches=1, nodes=0, scratch=0)]

    def describe_sizes(self) -> str:
        return ""


def compiler_mocks(record_cudagraph: Callable[..., Any]) -> list[Mock]:
    """Return the mocks of functions in which the compiler would execute something on the device."""
    from torch._inductor import cpu_vec_isa
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    fold = UniformValueConstantFolder.run

    def fold_on_cpu(folder: Any) -> Any:
        with _OnCpu():
            return fold(folder)

    return [
        Mock(
            "torch._inductor.graph.GraphLowering.compile_to_module",
            lambda graph: stub_module(graph),
            "importing the generated module compiles kernels and calling it launches them",
        ),
        Mock(
            "torch._inductor.cudagraph_trees.cudagraphify_impl",
            lambda model, *args, **kwargs: model,
            "recording a CUDA graph executes it",
        ),
        Mock(
            "torch._inductor.compile_fx.cudagraphify",
            lambda model, static_input_idxs=(), **kwargs: record_cudagraph(model, **kwargs),
            "recording a CUDA graph executes it; what it was given is kept",
        ),
        Mock(
            "torch_overlay._inductor.relaunch.runner.Runner",
            functools.partial(SimulatedRunner, record_cudagraph),
            "captures a CUDA graph; what it was given is kept",
        ),
        Mock(
            "torch._inductor.fx_passes.joint_graph.UniformValueConstantFolder.run",
            fold_on_cpu,
            "folds by executing constant nodes on their device, or in pinned memory, with all modes off",
        ),
        Mock(
            "torch._inductor.fx_passes.pad_mm._should_pad",
            lambda *args, **kwargs: torch._inductor.config.force_shape_pad,
            "times a matmul with padding and without; nothing is timed here",
        ),
        Mock("torch._inductor.utils.copy_misaligned_inputs", lambda *a, **k: ([], []), "reads addresses at run time"),
        Mock("torch._inductor.compile_fx.copy_misaligned_inputs", lambda *a, **k: ([], []), "imported by value"),
        Mock(
            "torch._inductor.select_algorithm.AlgorithmSelectorCache.benchmark",
            _first_triton_template,
            "times kernels; in their place the first Triton template wins, which is the same on every machine",
        ),
        Mock(
            "torch._inductor.select_algorithm.AlgorithmSelectorCache.make_precompile_fn",
            _returns(lambda: None),
            "compiles every candidate kernel",
        ),
        Mock(
            "torch._inductor.cpu_vec_isa.pick_vec_isa",
            lambda: cpu_vec_isa.VecAVX2(),
            "tries the C++ compiler out on the host's instruction sets, for seconds; host kernels stay text here",
        ),
        Mock(
            "torch._dynamo.guards.profile_guard_manager",
            _returns(0.0),
            "flushes the host's caches to time the guards: 30 ms for each frame",
        ),
        Mock("torch._inductor.select_algorithm.PRINT_AUTOTUNE", False, "would print times that nobody measured"),
        Mock("torch._inductor.select_algorithm._log_autotune_choices_stats", _returns(None), "prints them as well"),
        Mock(
            "triton.runtime.driver.driver._active",
            _device.TritonDriver(),
            "Triton would load libcuda to know its target",
        ),
    ]


class _OnCpu(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        # A copy to a device gets the device by position.
        args = [torch.device("cpu") if isinstance(a, torch.device) else a for a in args]
        return func(*args, **kwargs)


def _first_triton_template(self: Any, choices: Any, *args: Any, **kwargs: Any) -> dict[Any, float]:
    from torch._inductor.select_algorithm import ExternKernelCaller

    return {c: float(i + len(choices) * isinstance(c, ExternKernelCaller)) for i, c in enumerate(choices)}


def inductor_config() -> dict[str, Any]:
    return {
        "fx_graph_cache": False,  # nothing simulated may be found by a later real compile
        "fx_graph_remote_cache": False,
        "autotune_local_cache": False,
        "autotune_remote_cache": False,
        "bundle_triton_into_fx_graph_cache": False,
        "compile_threads": 1,  # no pool of processes, which would inherit half a simulation
        "triton.autotune_at_compile_time": False,  # runs kernels
        "benchmark_template_fusion": False,  # times kernels
        "cpp.vec_isa_ok": True,  # the picked instruction set is not tried out either
    }


@contextlib.contextmanager
def forgotten_caches() -> Iterator[None]:
    """Empty the caches that remember what device there is, on the way in and on the way out."""
    from torch._dynamo import device_interface
    from torch._inductor import codecache, utils
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    remembering = [
        fn
        for module in (_triton, utils)
        for fn in vars(module).values()
        if hasattr(fn, "cache_clear") and getattr(fn, "__module__", None) == module.__name__
    ]
    remembering += [DeviceProperties.create, codecache.CacheBase.get_system]

    def clear() -> None:
        for fn in remembering:
            fn.cache_clear()

    clear()
    try:
        with (
            mock.patch.dict(device_interface.caching_worker_device_properties, clear=True),
            mock.patch.dict(device_interface.caching_worker_current_devices, clear=True),
        ):
            yield
    finally:
        clear()


@contextlib.contextmanager
def private_cache_dir() -> Iterator[None]:
    """Give Inductor a temporary cache directory, since code generation writes template sources to it."""
    import tempfile

    with (
        tempfile.TemporaryDirectory(prefix="simulated_gpu_", ignore_cleanup_errors=True) as folder,
        mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}),
    ):
        yield
