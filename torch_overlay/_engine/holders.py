"""Finds and rebinds the references that others hold to an upstream function.

Replacing an attribute of a function's owner does not reach those who took the function by value: modules that imported
it by name, and objects that stored it when their module was loaded (a dispatch table, a frozen record). The modules are
found by identity in the namespaces of all loaded modules, and so are the keys of Dynamo's rules. The objects are named
by the seam, as a path such as "torch._dynamo.variables.streams:StreamVariable.tp_methods[record_event].impl";
test/test_seams.py asks the garbage collector for every referrer of every original and fails if one is left that no seam
names.
"""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple, TYPE_CHECKING

from torch_overlay.errors import OverlayError


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_overlay.seams import Seam

STEP = re.compile(r"\.(\w+)|\[([^\]]+)\]")


class Holder(NamedTuple):
    """Place, `container.name` or `container[name]`, that holds a function by value."""

    container: Any
    name: str
    is_item: bool

    def get(self) -> Any:
        return self.container[self.name] if self.is_item else getattr(self.container, self.name)

    def set(self, value: Any) -> None:
        if self.is_item:
            self.container[self.name] = value
        else:
            object.__setattr__(self.container, self.name, value)  # also sets the fields of a frozen record


def find_holder(path: str, target: str) -> Holder | None:
    """Return the holder at a path; None while its module is not loaded (it will then pick up the hook by itself)."""
    module_name, _, rest = path.partition(":")
    module = sys.modules.get(module_name)
    if module is None:
        return None
    steps = STEP.findall("." + rest)
    container: Any = module
    try:
        for attribute, item in steps[:-1]:
            container = getattr(container, attribute) if attribute else container[item]
        attribute, item = steps[-1]
        holder = Holder(container, attribute or item, bool(item))
        holder.get()
    except (AttributeError, KeyError, TypeError) as error:
        raise OverlayError("missing_holder", target, path, repr(error), "Report this: the seam is wrong.") from error
    return holder


def check_holder(path: str, target: str, expected: Any) -> Holder | None:
    """Return the holder at a path as find_holder does; raise an error if it doesn't hold `expected`."""
    holder = find_holder(path, target)
    if holder is not None and holder.get() is not expected:
        raise OverlayError(
            "missing_holder",
            target,
            f"{path} is {expected!r}",
            repr(holder.get()),
            "Another library replaced it in memory: import torch_overlay before that library, or leave one out.",
        )
    return holder


def rebind(triples: Iterable[tuple[Any, Any, Seam]]) -> None:
    """Replace each object by its successor in the namespaces of loaded modules; `triples` are (old, successor, seam).

    In torch's own modules and in ours, the object is replaced under every name. In other modules it is replaced only
    under its own name, by which it was imported; a variable of another name is the program's own, and keeps the old
    object.
    """
    successors = {id(old): (old, new, seam) for old, new, seam in triples}
    if not successors:
        return
    own = {seam.module.partition(".")[0] for _, _, seam in successors.values()} | {__name__.partition(".")[0]}
    for module_name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", None)
        # The test on the whole namespace runs in C: it takes a few milliseconds for a few thousand modules.
        if not isinstance(namespace, dict) or successors.keys().isdisjoint(map(id, list(namespace.values()))):
            continue
        is_own = module_name.partition(".")[0] in own
        for name, value in list(namespace.items()):
            if id(value) in successors:
                _, new, seam = successors[id(value)]
                if is_own or name == seam.qualname.rpartition(".")[2]:
                    namespace[name] = new
    _rebind_for_dynamo([(old, new) for old, new, _ in successors.values()])


def _rebind_for_dynamo(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Replace functions among the keys of Dynamo's rules for torch's functions. Dynamo makes this table when it first
    asks, and a program may have changed it since."""
    rules = getattr(sys.modules.get("torch._dynamo.trace_rules"), "get_torch_obj_rule_map", None)
    if rules is None or not rules.cache_info().currsize:
        return
    table = rules()
    for old, new in pairs:
        if old in table:
            table[new] = table.pop(old)
