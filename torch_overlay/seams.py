"""Defines seams: the named places where the overlay touches upstream code.

A seam is a frozen record. It names an upstream object, our implementation, and the fingerprint of the upstream source
that the implementation was written against; it says why it exists and when we can drop it. All seams are in one table,
`seam_table.SEAMS`. The installer (`_engine/`) and the patch exporter (`tools/export_patches.py`) both read that table
and nothing else, which keeps the two forms of the change equal.

Kinds:
    wrap      a function or method; a hook goes around it (hooks.wrapped_by)
    register  a module, written "torch.module:" with nothing after the colon; the implementation gets the module and
              returns a callable that undoes the registration (hooks.registered_by)
    module    functions of a module that are one thing, as a table or a policy is; the module is written as above,
              `methods` names them, and the hook around each is the function of the same name in the module `impl`

A fingerprint covers one definition, decorators included, and not its file: unrelated edits of the file don't matter.
The fingerprint of a constructor also covers the methods that our function overrides in the object
(Note [Subclasses of upstream's objects] of `hooks`), and that of a module's functions covers all of them.
This module finds definitions in source text without importing them. `tools/fingerprint.py` prints fingerprints.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import textwrap
import threading
from dataclasses import dataclass, replace
from typing import Literal, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Kind = Literal["wrap", "register", "module"]
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign | ast.ImportFrom
FunctionNode = (ast.FunctionDef, ast.AsyncFunctionDef)
_parse_lock = threading.Lock()

# Decorators that make a descriptor. A hook goes below them: it wraps the function, not the descriptor.
DESCRIPTOR_DECORATORS = ("staticmethod", "classmethod", "property", "cached_property", "setter", "getter", "deleter")


@dataclass(frozen=True)
class Seam:
    """Place where upstream code calls ours."""

    target: str
    impl: str
    kind: Kind = "wrap"
    # Slug of the patch that carries the seam; None for a seam that only the overlay form needs.
    patch: str | None = ""
    # First 16 hex digits of the SHA-256 of the upstream definition, and of those of `methods`; empty for "register".
    fingerprint: str = ""
    why: str = ""
    upstream: str = ""
    ends: str = "upstream takes the patch"
    # Other methods of the target's class that the implementation overrides in the object (hooks.override); of a
    # module, the functions, or methods of its classes.
    methods: tuple[str, ...] = ()
    # True if the import of the overlay installs the seam, in a module that torch loads: Note [One moment].
    early: bool = False

    def __post_init__(self) -> None:
        module, colon, name = self.target.partition(":")
        of_module = self.kind in ("register", "module")
        if not module.startswith("torch") or not colon or bool(name) == of_module:
            raise ValueError(f"{self.target!r} is not a target of kind {self.kind!r}")
        if bool(self.fingerprint) == (self.kind == "register"):
            raise ValueError(f"{self.target!r}: a {self.kind} seam has {'no' if self.fingerprint else 'a'} fingerprint")
        if self.kind == "module" and (len(self.methods) < 2 or ":" in self.impl):
            raise ValueError(f"{self.target!r}: a module seam has functions, and a module of ours with their hooks")

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]

    @property
    def definitions(self) -> tuple[str, ...]:
        """Names of the upstream definitions that the implementation was written against."""
        if self.kind == "module":
            return self.methods
        owner = self.qualname.rpartition(".")[0]
        return (self.qualname, *(f"{owner}.{name}" for name in self.methods))

    @property
    def hooks(self) -> tuple[Seam, ...]:
        """One seam for each place that changes: the seam itself, or each function of a module."""
        if self.kind != "module":
            return (self,)
        return tuple(
            replace(
                self,
                target=f"{self.target}{name}",
                impl=f"{self.impl}:{name.rpartition('.')[2]}",
                kind="wrap",
                methods=(),
            )
            for name in self.methods
        )


@dataclass(frozen=True)
class Patch:
    """Patch of the series: a change that can be sent upstream on its own, on top of the patches before it."""

    slug: str
    subject: str
    description: str
    upstream: str = "not sent yet"


class DefinitionNotFound(LookupError):
    """Raised if the source text has no definition of that name."""


def _definitions(body: Sequence[ast.stmt], name: str) -> Iterator[Definition]:
    for node in body:
        if isinstance(node, (*FunctionNode, ast.ClassDef)):
            if node.name == name:
                yield node
        elif isinstance(node, ast.Assign):
            if any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
                yield node
        elif isinstance(node, ast.AnnAssign):
            if isinstance(node.target, ast.Name) and node.target.id == name:
                yield node
        elif isinstance(node, ast.ImportFrom):
            if any((alias.asname or alias.name) == name for alias in node.names):
                yield node
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            for field in ("body", "orelse", "handlers", "finalbody"):
                for inner in getattr(node, field, ()):
                    yield from _definitions(inner.body if isinstance(inner, ast.ExceptHandler) else [inner], name)


def find_definition(tree: ast.Module, qualname: str) -> Definition:
    """Return the definition of a dotted name; if a name is defined more than once, the last one, as at run time."""
    body: Sequence[ast.stmt] = tree.body
    found: Definition | None = None
    for name in qualname.split("."):
        *_, found = (None, *_definitions(body, name))
        if found is None:
            raise DefinitionNotFound(qualname)
        body = found.body if isinstance(found, ast.ClassDef) else ()
    if found is None:
        raise DefinitionNotFound(qualname)
    return found


def first_line(node: Definition) -> int:
    """Return the line number, from 1, at which a definition starts, its decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def segment(source: str, node: Definition) -> str:
    """Return the text of a definition, decorators included, dedented."""
    lines = source.splitlines()[first_line(node) - 1 : node.end_lineno]
    return textwrap.dedent("\n".join(lines)) + "\n"


def hook_line(node: Definition) -> int:
    """Return the line number before which a decorator goes: above all decorators but those that make a descriptor."""
    for decorator in getattr(node, "decorator_list", []):
        callee = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = callee.attr if isinstance(callee, ast.Attribute) else getattr(callee, "id", "")
        if name not in DESCRIPTOR_DECORATORS:
            return decorator.lineno
    return node.lineno


@functools.lru_cache(maxsize=1)
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


def fingerprint(source: str, *qualnames: str) -> str:
    """Return the fingerprint of definitions in a module's source text."""
    # CPython 3.11 counts the depth of all threads' trees in one variable: calls at once end in a SystemError.
    with _parse_lock:
        tree = _parse(source)
    text = "".join(segment(source, find_definition(tree, name)) for name in qualnames)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
