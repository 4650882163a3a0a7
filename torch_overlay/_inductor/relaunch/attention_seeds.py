"""Moves seeds of attention to where the operators expect them: host memory outside of a capture, the device in one.

Note [Seeds of attention]
The forward of memory-efficient attention returns a seed and an offset of random numbers for its backward, as scalars in
host memory, or in a capture as tensors on the device. The backward assumes that it runs in the same mode. If the
forward was launched as a graph and the backward runs as compiled (its first call, a refusal,
`config.cudagraph_verify`), the backward reads a device address on the host, which crashes the process; and the graph of
a backward whose forward ran as compiled would hold host addresses. Therefore
1. Outside of a capture the operators get their seeds in host memory, wherever the seeds were; the copy waits for the
   device. That is done where compiled code calls the operator, so it also happens in code without a graph.
2. A run as compiled shows which inputs of a region are seeds (`noted`). Seeds are not in the region's key, and `Runner`
   moves them to the device before the region is launched.
3. A caller that gets the seeds gets them in host memory, as in eager: such a forward is split off (`are_returned`).
Flash attention and cuDNN's attention keep their seeds on the device at all times.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, TYPE_CHECKING

import torch

from torch_overlay.thread_value import ThreadValue


if TYPE_CHECKING:
    from collections.abc import Callable, Container

OPERATORS = ("_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward")
FORWARDS = ("_scaled_dot_product_efficient_attention", "_efficient_attention_forward")
SEEDS = ("philox_seed", "philox_offset")
RESULTS = (2, 3)  # the seeds among the results of a forward
PROBABILITY = "dropout_p"


_noted: ThreadValue[set[int] | None] = ThreadValue(None)


def noted() -> contextlib.AbstractContextManager[set[int]]:
    """Collect the addresses of the seeds that this thread passes to operators."""
    return _noted.within(set())


def register() -> Callable[[], None]:
    """Wrap the operators, by replacing the `_op` that an OpOverload calls. Return a function that undoes it."""
    undo = contextlib.ExitStack()
    for overload in [getattr(torch.ops.aten, name).default for name in OPERATORS]:
        undo.callback(setattr, overload, "_op", overload._op)
        overload._op = with_seeds(overload._op, [argument.name for argument in overload._schema.arguments])
    return undo.close


def with_seeds(original: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """Return the operator whose arguments have these names, wrapped so that it finds its seeds in host memory outside
    of a capture."""

    @functools.wraps(original, assigned=("__module__",), updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args)) | kwargs
        seeds: list[Any] = [given.get(name) for name in SEEDS]
        if all(type(seed) is torch.Tensor for seed in seeds):
            if _noted.value is not None:
                _noted.value.update([seed.data_ptr() for seed in seeds])
            if given.get(PROBABILITY) and any(map(on_device, seeds)) and not is_capturing():
                given |= zip(SEEDS, map(to_host, seeds))
                args = tuple([given[name] for name in names[: len(args)]])
                kwargs = {name: given[name] for name in kwargs}
        return original(*args, **kwargs)

    return call


def on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu()


def to_device(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Copy a seed to the device, ordered on the current stream. The few bytes of pageable memory are read before this
    returns."""
    return tensor.to(device, non_blocking=True)


def are_returned(node: torch.fx.Node, returned: Container[torch.fx.Node]) -> bool:
    """True for a forward of attention with a seed among what the caller gets."""
    if getattr(node.target, "namespace", None) != "aten" or node.target._opname not in FORWARDS:  # type: ignore
        return False
    return any(user in returned and user.args[1] in RESULTS for user in node.users)


def may_be_seed(value: Any) -> bool:
    is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided  # others have no address
    return is_plain and value.dtype is torch.int64 and value.numel() == 1
