"""Defines the simulated GPU's fake tensor mode, with inputs of a program, pinned host memory and `record_stream`, and
its kernels below the mode.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import warnings
from collections import Counter
from typing import Any, TYPE_CHECKING

import torch
from torch._higher_order_ops.associative_scan import associative_scan_op, associative_scan_op_dense
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.map import map_dense, map_impl
from torch._higher_order_ops.scan import generic_scan, scan_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.multiprocessing.reductions import StorageWeakRef

from torch_overlay.testing._text import OURS, TORCH


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch_overlay.testing._device import Devices

aten = torch.ops.aten

_LOOPS = {True: 3, False: 100}  # times that a place reads a bool, or a number, until it gets a zero


class MadeUp:
    """Values for reads of a device that computes nothing, so that the program can go on: all are one, or true. A loop
    that reads in one place again and again gets a zero in the end, so that it ends. A loop that reads in several places
    by turns gets its zero later, since it looks like a program that reads there now and then.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget earlier reads, for a new call."""
        self.line: tuple[str, int] | None = None
        self.times = 0
        self.of_line: Counter[tuple[str, int]] = Counter()

    def number(self, dtype: torch.dtype) -> bool | int | float:
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith((OURS, TORCH)) and frame.f_back is not None:
            frame = frame.f_back
        line = frame.f_code.co_filename, frame.f_lineno
        self.times = self.times + 1 if line == self.line else 1
        self.line = line
        self.of_line[line] += 1
        most = _LOOPS[dtype is torch.bool]
        value = self.times % most != 0 and self.of_line[line] % (3 * most) != 0
        return float(value) if dtype.is_floating_point else value if dtype is torch.bool else int(value)


class NotSimulated(UnsupportedOperatorException):
    """An operator with results has no fake kernel: stock fake tensors run it on the device, and there is none here."""

    def __str__(self) -> str:
        return (
            f"simulated_gpu: {self.func} can't be simulated. It has no fake kernel, which says what its result looks "
            "like without the data, and there is no device to run it on. Give it one (torch.library.register_fake), or "
            "leave it out of what is simulated"
        )


class _FakeModeOfThread(threading.local):
    """State of a fake mode that belongs to the thread in which it is active."""

    def __init__(self) -> None:
        self.in_kernel_invocation = False
        self.enter_stack: list[Any] = []


class SimulatedTensorMode(FakeTensorMode):
    """A mode for fake tensors that know whether they are pinned. Stock fake tensors refuse to be pinned, answer
    is_pinned from a cache keyed by shape, and pass `record_stream` on to the CUDA runtime.

    There is one mode for the process, and several threads may be inside of it. A copy of a tensor has the same mode.
    """

    def __init__(self, devices: Devices) -> None:
        self._of_thread = _FakeModeOfThread()
        super().__init__(allow_non_fake_inputs=True)
        self._devices = devices
        self._pinned: dict[int, StorageWeakRef] = {}
        self.made_up = MadeUp()
        self.listener: Any = None  # an analysis.race_check.simulated_device.SimulatedDevice

    def __deepcopy__(self, memo: Any) -> SimulatedTensorMode:
        """Return the mode itself: copied weak references to storages would be freed twice."""
        return self

    @property
    def in_kernel_invocation(self) -> bool:  # type: ignore[override]
        return self._of_thread.in_kernel_invocation

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._of_thread.in_kernel_invocation = value

    @property
    def enter_stack(self) -> list[Any]:  # type: ignore[override]
        return self._of_thread.enter_stack

    @enter_stack.setter
    def enter_stack(self, value: list[Any]) -> None:
        self._of_thread.enter_stack = value

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is aten._local_scalar_dense.default and not isinstance(args[0], torch.Tensor):
            # A tensor that is marked as a number comes as that number: `upstream_fixes.wrapped_numbers`.
            return args[0]
        if func in (aten.item.default, aten.is_nonzero.default) and args[0].numel() == 1:  # else fake tensors keep it
            number = self.dispatch(aten._local_scalar_dense.default, types, args)
            return number if func is aten.item.default else bool(number)
        if func is aten.record_stream.default and args[0].device.type == "cpu":
            raise NotImplementedError("aten::record_stream: a tensor in host memory has no kernel for it")
        if self.listener is None:
            return self._simulate(func, types, args, kwargs)
        return self.listener.dispatch(func, args, kwargs, lambda: self._simulate(func, types, args, dict(kwargs)))

    def _simulate(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        if func is aten._pin_memory.default:
            return self._pin(super().dispatch(aten.clone.default, types, args[:1]))
        if func is aten._local_scalar_dense.default:
            return self._item(types, args)
        if func is aten.record_stream.default:
            return self._devices.record_stream(*args)
        pin = kwargs.pop("pin_memory", False)
        if func is aten._to_copy.default and kwargs.get("non_blocking") and args[0].device.type != "cpu":
            device = kwargs.get("device")  # a copy that may return early is made in pinned memory
            pin = device is not None and torch.device(device).type == "cpu"
        try:
            out = super().dispatch(func, types, args, kwargs)
        except DynamicOutputShapeException:
            if func is not aten.nonzero.default:
                raise
            size = args[0].numel(), args[0].dim()
            out = super().dispatch(aten.new_empty.default, types, (args[0], size), {"dtype": torch.int64})
        return self._pin(out) if pin and isinstance(out, torch.Tensor) else out

    def _item(self, types: Any, args: Any) -> Any:
        try:
            return super().dispatch(aten._local_scalar_dense.default, types, args)
        except DataDependentOutputException:
            return self.made_up.number(args[0].dtype)

    def _pin(self, tensor: Any) -> torch.Tensor:
        if tensor.device.type != "cpu":
            raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """True if the tensor's storage is pinned: also for a view."""
        known = self._pinned.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def deepcopy(self, tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
        """Copy a tensor as one with data is copied: copies of tensors that share memory share memory."""
        if id(tensor) in memo:
            return memo[id(tensor)]
        with torch.no_grad(), self:
            storage = tensor.untyped_storage()
            copies = memo.setdefault("simulated storages", {})
            if storage._cdata not in copies:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                copies[storage._cdata] = whole.set_(storage, 0, (storage.nbytes(),), (1,)).clone()
            new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            new.set_(copies[storage._cdata].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        memo[id(tensor)] = new.requires_grad_(tensor.requires_grad)
        if tensor.grad is not None:
            new.grad = copy.deepcopy(tensor.grad, memo)
        for name in vars(tensor).keys() - vars(new).keys():
            setattr(new, name, copy.deepcopy(getattr(tensor, name), memo))
        return new

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop the weak reference to a tensor from the memo of tensors that were made fake."""
        memo = self.fake_tensor_converter.meta_converter.tensor_memo
        for key in [k for k, known in memo.items() if known is tensor]:
            del memo[key]


@cond_op.py_impl(SimulatedTensorMode)
def _choose(
    mode: SimulatedTensorMode,
    predicate: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[Any],
) -> Any:
    with mode:
        return (true_fn if predicate else false_fn)(*operands)


@while_loop_op.py_impl(SimulatedTensorMode)
def _loop(
    mode: SimulatedTensorMode,
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried: Sequence[Any],
    additional: Sequence[Any],
) -> Any:
    with mode:
        while cond_fn(*carried, *additional):
            carried = body_fn(*carried, *additional)
        return carried


def _loop_in_python(op: Any, dense: Callable[..., Any]) -> None:
    """Run an operator that loops over tensors of known sizes as eager runs it on a device."""

    def run(mode: SimulatedTensorMode, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return dense(*args, **kwargs)

    op.py_impl(SimulatedTensorMode)(run)


_loop_in_python(map_impl, map_dense)
_loop_in_python(scan_op, lambda fn, init, xs, others, *_: generic_scan(fn, init, xs, additional_inputs=others))
_loop_in_python(associative_scan_op, associative_scan_op_dense)


# ---- attention

# Note [The attention kernel of the simulated GPU]
# `scaled_dot_product_attention` chooses its kernel in C++ from the properties of the device, for which it asks the
# driver; without a driver it takes the plain formula, and a compiled transformer would look nothing like the real one.
# The choice is made here as an H200 was seen to make it: cuDNN for 16-bit types, flash attention where the width of a
# head does not suit cuDNN, the memory-efficient kernel for wider heads and for float32, the formula for the rest. The
# kernels' own operators then do what they do on a device.
_CUDNN_HEAD_DIM, _FLASH_HEAD_DIM = 128, 256
_SIXTEEN_BIT = (torch.float16, torch.bfloat16)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    training = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    kernel = _attention_kernel(query, key, value, attn_mask, enable_gqa)
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, training, dropout_p, is_causal, False, scale=scale
        )[0]
    if kernel == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if kernel == "efficient":
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, training, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _attention_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None, gqa: bool
) -> str:
    enabled = torch.backends.cuda
    tensors = (query, key, value)
    if any(t.dim() != 4 for t in tensors) or len({t.dtype for t in tensors}) > 1:
        return "math"
    width = query.shape[-1]
    same_heads = len({t.shape[1] for t in tensors}) == 1
    sixteen_bit = query.dtype in _SIXTEEN_BIT and all(t.shape[-1] == width for t in tensors) and (same_heads or gqa)
    if sixteen_bit and width % 8 == 0 and width <= _CUDNN_HEAD_DIM and enabled.cudnn_sdp_enabled():
        return "cudnn"
    if sixteen_bit and attn_mask is None and width <= _FLASH_HEAD_DIM and enabled.flash_sdp_enabled():
        return "flash"
    if same_heads and query.dtype in (*_SIXTEEN_BIT, torch.float32) and enabled.mem_efficient_sdp_enabled():
        return "efficient"
    return "math"


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    width = query.shape[-1]
    if padding := -width % 8:
        scale = width**-0.5 if scale is None else scale
        query, key, value = (torch.nn.functional.pad(t, (0, padding)) for t in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :width] if padding else out


@contextlib.contextmanager
def kernels(mode: SimulatedTensorMode) -> Iterator[None]:
    """Register kernels for CUDA tensors: allocations that return fake tensors even where no mode is active, and the
    choice of an attention kernel.

    Dynamo switches all modes off while it traces, and runs a few things for real there: an optimizer's `_init_group`,
    the meta functions of `torch._prims`. They end up in `empty` and `empty_strided`.
    """
    library = torch.library.Library("aten", "IMPL")  # noqa: TOR901

    def fake(op: Any) -> Any:
        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            with mode:
                return op(*args, **kwargs)

        return allocate

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel")
        for op in (aten.empty.memory_format, aten.empty_strided.default):
            library.impl(op, fake(op), "CUDA", allow_override=True)
        library.impl("scaled_dot_product_attention", _attention, "AutogradCUDA", allow_override=True)
    try:
        yield
    finally:
        library._destroy()
