"""Lists the remedies that are switches: the doctor tries them."""

from __future__ import annotations

import importlib
from typing import Any, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch_overlay.analysis.doctor.diagnosis import Finding

DYNAMO, INDUCTOR, OVERLAY = "torch._dynamo.config", "torch._inductor.config", "torch_overlay.config"

# Code of the cause, a part of its message, and the options that may remove it.
SWITCHES: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("graph-break", "item", {f"{DYNAMO}.capture_scalar_outputs": True}),
    ("graph-break", "Dynamic shape operator", {f"{DYNAMO}.capture_dynamic_output_shape_ops": True}),
    ("graph-break", "ata dependent operator", {f"{DYNAMO}.capture_scalar_outputs": True}),
    ("inductor", "incompatible op", {f"{INDUCTOR}.graph_partition": True}),
    ("inductor", "mutated inputs", {f"{INDUCTOR}.triton.cudagraph_support_input_mutation": True}),
    ("split-dynamic", "", {f"{INDUCTOR}.triton.cudagraph_skip_dynamic_graphs": False}),
    ("split-small", "", {f"{INDUCTOR}.triton.cudagraph_min_partition_size": 0}),
    ("cpp-wrapper", "", {f"{INDUCTOR}.cpp_wrapper": False}),
    ("templates", "", {f"{OVERLAY}.cudagraph_templates": 1024}),
    ("streams", "", {f"{INDUCTOR}.graph_partition": True}),
    ("split-devices", "", {f"{OVERLAY}.cudagraph_rewrites": True}),
    ("split-host", "", {f"{OVERLAY}.cudagraph_rewrites": True}),
)


def switches(findings: Iterable[Finding]) -> list[tuple[str, dict[str, object]]]:
    """Return (code, options) of each remedy that is a switch and not set yet, the most costly cause first."""
    found: list[tuple[str, dict[str, object]]] = []
    for finding in findings:
        for code, part, options in SWITCHES:
            if finding.code != code or part not in finding.message or options in [known for _, known in found]:
                continue
            if any(getattr(*split(name)) != value for name, value in options.items()):
                found.append((code, options))
    return found


def split(name: str) -> tuple[Any, str]:
    """Return the configuration module and the option in it that a full name stands for."""
    module, _, option = name.partition(".config.")
    return importlib.import_module(f"{module}.config"), option


def as_text(options: dict[str, object]) -> str:
    return ", ".join(f"{name} = {value!r}" for name, value in options.items())
