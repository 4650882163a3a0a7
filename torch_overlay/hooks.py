"""Defines the decorators that join upstream code to ours.

Note [One text, two forms]
The same change to PyTorch is kept in two forms. In the overlay form, `import torch_overlay` puts a hook around each
upstream function in memory. In the patched form, the same hook is one decorator line above the upstream definition:

    @wrapped_by("torch_overlay._inductor.emit:codegen_free")
    def codegen_free(self, buffer): ...

Both use the decorators below, so both behave alike. This module imports nothing but the standard library, and a hook
imports its implementation at its first call: upstream files can therefore import this module at their top without
making a cycle, and a program that never reaches a hook never loads the hook's implementation.

An implementation of `wrapped_by` is called as `implementation(original, *args, **kwargs)`. `registered_by`
calls the implementation with the upstream module, once, when that module is loaded; the implementation returns a
callable that undoes the registration.

Note [Subclasses of upstream's objects]
Where several methods of a class are ours, one hook is around its constructor, and makes the object one of a subclass
that overrides them (`override`). Upstream's class stays as it is, a library's own subclass of it gets the overrides,
too, and what a library has put into the class is called as upstream's method would be.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable


def resolve(reference: str) -> Callable[..., Any]:
    """Return the object that a reference of the form "package.module:name.name" names."""
    module_name, _, path = reference.partition(":")
    found: Any = importlib.import_module(module_name)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def wrapped_by(reference: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function: its calls go to the implementation, which gets the original as its first argument."""

    def decorate(original: Callable[..., Any]) -> Callable[..., Any]:
        implementation: Callable[..., Any] | None = None

        @functools.wraps(original)
        def hook(*args: Any, **kwargs: Any) -> Any:
            nonlocal implementation
            if implementation is None:
                implementation = resolve(reference)
            return implementation(original, *args, **kwargs)

        hook.__overlay__ = reference  # type: ignore[attr-defined]
        return hook

    return decorate


def override(instance: object, **methods: Callable[..., Any]) -> None:
    """Make an object one of a subclass of its class, in which `methods` override those of their names. Each is called
    as `method(original, instance, *args, **kwargs)`. A method that a subclass of ours defines stays.
    """
    key = tuple(methods.items())
    if key not in getattr(type(instance), "__overrides__", ()):
        instance.__class__ = _overriding(type(instance), key)


@functools.cache
def _overriding(base: type, methods: tuple[tuple[str, Callable[..., Any]], ...]) -> type:
    def overriding(name: str, implementation: Callable[..., Any]) -> Callable[..., Any]:
        def original(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(super(subclass, self), name)(*args, **kwargs)

        @functools.wraps(getattr(base, name))
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return implementation(original, self, *args, **kwargs)

        return method

    def is_ours(name: str) -> bool:
        owner = next(cls for cls in base.__mro__ if name in vars(cls))
        return owner.__module__.startswith(f"{__name__.rpartition('.')[0]}.")

    body: dict[str, Any] = {name: overriding(name, method) for name, method in methods if not is_ours(name)}
    body |= {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    body["__overrides__"] = (*getattr(base, "__overrides__", ()), methods)
    subclass = type(base)(base.__name__, (base,), body)
    return subclass


def put_in_place() -> None:
    """Have the hooks in place before upstream's functions are replaced for a while: in the overlay form, the first
    compilation would install them, and refuse what isn't upstream's own."""
    from torch._guards import CompileContext

    CompileContext(None)


def registered_by(reference: str, module_name: str) -> Callable[[], None]:
    """Let the implementation register its objects in a module, by `registered_by("module:register", __name__)` at the
    module's end. The result undoes the registration.
    """
    return resolve(reference)(sys.modules[module_name])
