"""Checks whether compiled code may be captured at all, before it is."""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch_overlay._inductor.relaunch.proof.nodes import Refusal
from torch_overlay._inductor.relaunch.refusals import COMMUNICATION


if TYPE_CHECKING:
    from collections.abc import Callable

# Who knows more of compiled code adds a check, which raises `Refusal`.
checks: list[Callable[[Any], None]] = []


def check(model: Any) -> None:
    """Raise `Refusal` if this compiled code can't be captured."""
    for each in (check_collectives, *checks):
        each(model)


def check_collectives(model: Any) -> None:
    """Refuse code that contains collectives: it may come from a cache, compiled for other graphs than ours. Note
    [Collectives]."""
    if found := set(names_in(model)).intersection(COMMUNICATION):
        message = f"it contains collectives ({', '.join(sorted(found))}), and was compiled to keep them inside"
        raise Refusal("collective", f"{message}; torch._inductor.config.force_disable_caches compiles it anew")


def names_in(model: Any) -> tuple[str, ...]:
    """Return the names of globals and attributes in the code of a compiled function."""
    code = getattr(getattr(model, "__func__", model), "__code__", None)
    return code.co_names if code is not None else ()
