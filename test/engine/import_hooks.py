"""Import hooks as other libraries have them."""

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any


class ChainedLoader:
    """Stands for a loader, runs it, and calls back; what it doesn't know it asks the loader."""

    def __init__(self, loader: Any, called_back: Callable[[ModuleType], None]) -> None:
        self.loader, self.called_back = loader, called_back
        self.exec_module = self._exec_module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def _exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.called_back(module)


class Watchdog:
    """A tracer's finder: asks all finders from within its own, and wraps the loader that they give for any module."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.finding: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname in self.finding:
            return None
        self.finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
            if spec is not None and spec.loader is not None and not isinstance(spec.loader, ChainedLoader):
                spec.loader = ChainedLoader(spec.loader, lambda module: self.seen.append(module.__name__))
            return spec
        finally:
            self.finding.discard(fullname)


class Instrumented(SourceFileLoader):
    """Compiles the source as something else, here as itself."""

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)


class Instrumenter:
    """A type checker's finder: answers for the modules of its packages itself, and asks nobody but the path."""

    def __init__(self, *packages: str) -> None:
        self.packages, self.loaded = packages, 0

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = Instrumented(fullname, spec.loader.path)
            self.loaded += 1
        return spec


def install(finder: Any) -> Any:
    sys.meta_path.insert(0, finder)
    return finder
