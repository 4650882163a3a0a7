"""Chooses the attention kernel that runs on the simulated GPU.

`scaled_dot_product_attention` chooses its kernel in C++ from the properties of the device, for which it asks the
driver; without a driver it takes the plain formula, and a compiled transformer would look nothing like the real one.
The choice is made here as an H200 was seen to make it: cuDNN for 16-bit types, flash attention where the width of a
head does not suit cuDNN, the memory-efficient kernel for wider heads and for float32, the formula for the rest. The
kernels' own operators then do what they do on a device.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from collections.abc import Iterator


aten = torch.ops.aten

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
    kernel = _choose(query, key, value, attn_mask, enable_gqa)
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


def _choose(
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
def attention() -> Iterator[None]:
    """Make `scaled_dot_product_attention` of CUDA tensors choose its kernel here."""
    library = torch.library.Library("aten", "IMPL")  # noqa: TOR901
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel")
        library.impl("scaled_dot_product_attention", _attention, "AutogradCUDA", allow_override=True)
    try:
        yield
    finally:
        library._destroy()
