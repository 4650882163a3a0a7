"""On a PyTorch that has the landing stack applied (`tools/run_stack.py`): `torch_overlay.x` is the stack's own module.

What the stack has not is the overlay's, of which no seam is installed. The options of `torch_overlay.config` are
upstream's options, wherever these are.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


# Switches of the stack that are off until all of it is there: what `torch_overlay.config.streams` is.
STREAMS = (
    ("torch._dynamo.config", "streams"),
    ("torch._functorch.config", "stream_placement"),
    ("torch._inductor.config", "triton.streams"),
)


class Options(ModuleType):
    """Options of several groups under one name, as `torch_overlay.config` has them. A group is a module of options, or
    a class in one: `torch._inductor.config.triton`."""

    def __init__(self, name: str, groups: Sequence[str]) -> None:
        super().__init__(name)
        self.__dict__["groups"] = [self._group(path) for path in groups]

    @staticmethod
    def _group(path: str) -> tuple[Any, str]:
        with contextlib.suppress(ImportError):
            return importlib.import_module(path), ""
        module, _, name = path.rpartition(".")
        return importlib.import_module(module), f"{name}."

    def _where(self, option: str) -> list[tuple[Any, str]]:
        if option == "streams":
            return [(importlib.import_module(path), name) for path, name in STREAMS]
        found = [(module, prefix + option) for module, prefix in self.groups if prefix + option in module._config]
        if not found:
            raise AttributeError(f"the landing stack has no option {option}")
        return found

    def __getattr__(self, option: str) -> Any:
        if option.startswith("__"):
            raise AttributeError(option)
        module, name = self._where(option)[-1]
        return getattr(module, name)

    @contextlib.contextmanager
    def patch(self, **changes: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for option, value in changes.items():
                for module, name in self._where(option):
                    stack.enter_context(module.patch({name: value}))
            yield


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Mapping[str, Sequence[str]]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in self.names else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        targets = self.names[spec.name]
        if spec.name == "torch_overlay.config":
            return Options(spec.name, targets)
        module = importlib.import_module(targets[0])
        self.genuine_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        if not isinstance(module, Options):
            module.__spec__ = self.genuine_spec


def install() -> None:
    """Let imports of the overlay's modules find those of the stack. Does nothing the second time."""
    import landing_stack  # pyrefly: ignore[missing-import]

    os.environ["TORCH_OVERLAY_DISABLE"] = "1"
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, Finder(landing_stack.NAMES))
    skipped = importlib.import_module("torch_overlay._skip_files")  # Dynamo traces no frame of the simulated GPU
    skipped.register(importlib.import_module("torch._dynamo.trace_rules"))
    policy = importlib.import_module("torch_overlay._inductor.relaunch.policy").RelaunchPolicy()
    switches = dict.fromkeys(STREAMS, True) | {("torch._inductor.config", "cudagraph_policy"): policy}
    for (path, name), value in switches.items():
        # As defaults, as they will be: what is set is set for one thread only.
        importlib.import_module(path)._config[name].default = value
