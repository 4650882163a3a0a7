"""Makes the status that `torch_overlay.status()` returns."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

from torch_overlay._options import check, variable
from torch_overlay.table import titled
from torch_overlay.version import __version__

from . import verify


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_overlay.seams import Seam

    from .install import Installer

# Option of torch_overlay.config -> what it switches. The comment in config.py has the details.
FEATURES = {
    "streams": "user streams and events go through the compiler, but for FX wrappers",
    "nvtx": "profiles name calls, graphs and side streams; profiler ranges stay in compiled stream programs",
    "fold_branches_below_us": "small branches on side streams run fused on the caller's stream",
    "activation_offload": "saved activations wait in host memory, beyond a budget of device memory",
    "cudagraphs": "who makes CUDA graphs of compiled code: relaunch, trees or off",
    "cudagraph_templates": "a region keeps so many relaunched graphs for different sizes",
    "cudagraph_verify": "every relaunch is compared with the compiled code",
    "cudagraph_concurrency": "independent kernels of a graph run side by side",
    "cudagraph_rewrites": "small host tensors that a graph reads are kept on the device",
}


@dataclass(frozen=True)
class SeamState:
    """A seam and its state: "off", "waiting" for the first compilation, "installed", or "taken out" by another library,
    and the next compilation disables the overlay.
    """

    seam: Seam
    state: str


@dataclass(frozen=True)
class Feature:
    """An option, whether it has effect, and who decided that."""

    name: str
    description: str
    on: bool
    why: str
    value: Any = ""


@dataclass(frozen=True)
class Status:
    """State of the overlay in this process."""

    enabled: bool
    why: str
    version: str
    base: dict[str, str]
    found: dict[str, str]
    edited_files: tuple[str, ...]
    seams: tuple[SeamState, ...]
    features: tuple[Feature, ...]
    coverage: str = ""  # one line about CUDA graphs, once something was compiled

    def tables(self, seams: bool = False) -> list[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
        """Return tables of text, with title and columns; the last one has all seams, or their number in each state."""
        base = [(name, needed, self.found[name]) for name, needed in self.base.items()]
        options = [(f.name, str(f.value), f.description, f.why) for f in self.features]
        listed = [(s.state, s.seam.kind, s.seam.target, s.seam.patch or "") for s in self.seams]
        counts = [(state, str(number)) for state, number in Counter(row[0] for row in listed).items()]
        columns = ("state", "kind", "target", "patch") if seams else ("state", "number")
        return [
            ("Base", ("", "needed", "found"), base),
            ("Options of torch_overlay.config", ("option", "value", "effect", "set by"), options),
            ("Seams", columns, listed if seams else counts),
        ]

    def lines(self) -> list[str]:
        """Return what is no table."""
        lines = [f"{name} differs from the release, but no seam's target in it does" for name in self.edited_files]
        lines += [f"CUDA graphs: {self.coverage}"] * bool(self.coverage)
        return [*lines, f"torch_overlay {self.version}: {'enabled' if self.enabled else 'not enabled'} ({self.why})"]

    def __str__(self) -> str:
        return "\n".join([*(titled(*table) for table in self.tables()), *self.lines()])


def installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def feature(installer: Installer, name: str) -> Feature:
    """Read an option and find out who set it."""
    if not installer.enabled:
        return Feature(name, FEATURES[name], False, "the overlay is not enabled")
    from torch.utils import _config_module

    from torch_overlay import config
    from torch_overlay._stream_handling import handles_streams

    try:
        value = getattr(config, name)
        check(name, value)
    except Exception as error:  # somebody has put something there past the checks
        return Feature(name, FEATURES[name], False, f"not understood: {' '.join(str(error).split())}")
    entry: Any = config._config[name]  # type: ignore[attr-defined]
    unset = _config_module._UNSET_SENTINEL
    by_default = entry.default if entry.env_value_default is unset else entry.env_value_default
    if entry.user_override.get() not in (unset, by_default):  # config.patch assigns the previous value at its end
        why = f"torch_overlay.config.{name} was assigned"
    elif entry.env_value_default is not unset:
        why = f"{variable(name)} is set in the environment"
    else:
        why = "default"
    on = bool(value) and value != "off"
    if name == "streams" and on and not handles_streams():
        on, why = False, "torch._inductor.config asks for an FX wrapper: streams are upstream's there"
    return Feature(name, FEATURES[name], on, why, value)


def make_status(installer: Installer) -> Status:
    base = verify.base()
    seams = installer.get_seams()
    taken = installer.taken_out()
    why = installer.off_because
    if installer.enabled:
        why = f"{len(seams)} seams {'wait for the first compilation' if installer.state == 'waiting' else 'installed'}"
        why += f", {len(taken)} taken out by another library" * bool(taken)
        why += f"; {verify.untested()}" * bool(verify.untested())
    return Status(
        enabled=installer.enabled,
        why=why,
        version=__version__,
        base={"torch": base["torch"], "triton": base["triton"], "python": "3.11 to 3.15"},
        found={
            "torch": installed_version("torch"),
            "triton": installed_version("triton"),
            "python": platform.python_version(),
        },
        edited_files=tuple(installer.edited_files),
        seams=tuple(
            SeamState(seam, "taken out" if any(hook.target in taken for hook in seam.hooks) else installer.state)
            for seam in seams
        ),
        features=tuple(feature(installer, name) for name in FEATURES),
        coverage=coverage(),
    )


def coverage() -> str:
    """Return one line about what runs in CUDA graphs; empty if nothing that asks for them was compiled."""
    module = sys.modules.get("torch_overlay._inductor.relaunch.coverage")
    found = module.coverage() if module is not None else None
    return found.summary() if found is not None and found.functions else ""
