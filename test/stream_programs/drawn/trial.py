"""A drawn program on trial: what is wrong with it, the smallest program with the same fault, and its test file."""

from __future__ import annotations

import textwrap
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from unittest import mock

import torch
from torch._inductor import lowering
from torch._inductor.graph import GraphLowering

from stream_programs.drawn.kit import as_program
from stream_programs.drawn.steps import smaller, Spec
from stream_programs.drawn.writer import write, Written


COMPILED = ("default", "reduce-overhead")

# Where stock PyTorch fails, without streams, too, if a tensor and its view are given to a graph after a graph break,
# and updated there: it needs gradients; another view is returned. And where the view is one of real numbers as complex
# ones (Dynamo makes it again of the whole tensor). And in the backward of a conjugate, given a plain tangent: upstream
# has traced one that is a conjugate itself. And where `torch.complex` writes to a tensor what it makes of a transpose.
REFUSED = (
    "aot_autograd() does not yet handle",
    "incorrect out shape after application of ViewMeta sequence",
    "Tensor must have a last dimension of size 2",
    "view_as_real doesn't work on unresolved conjugated tensors",
    "must be 1 to view ComplexFloat as Float",
)


@dataclass(frozen=True)
class Verdict:
    """`kind`: race, lost, redundant (of the compiled program), invalid (the generator's fault), mismatch (on a GPU), or
    the name of an exception. `code` is what was generated for the program, region by region: the next compilation may
    not have the fault.
    """

    kind: str
    mode: str
    text: str
    code: str = field(default="", repr=False)

    @property
    def fault(self) -> tuple[str, str]:
        """The same for what is likely the same fault: RAW is no other than RAW."""
        return self.kind, self.text.split(maxsplit=1)[0] if self.text else ""


def know_operators(known: bool) -> None:
    """Let Inductor compile as a process does that has compiled these operators before, or has not: it realizes the
    inputs of the fallbacks that it knows of earlier than those of an operator that it sees for the first time.
    """
    prefix = "overlay_test::"
    names = [name[len(prefix) :] for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)]
    for name in names:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.overlay_test, packet), overload or "default")
        for registry in (lowering.lowerings, lowering._maybe_layout_constraints):
            registry.pop(operator, None)
        lowering.fallbacks.discard(operator)
        lowering.needs_realized_inputs.discard(operator)
        if known:
            lowering.needs_realized_inputs.add(operator)


def judge(written: Written, modes: Sequence[str], on_gpu: bool, seeds: int = 5) -> Verdict | None:
    """None if the program is right in all modes. The default mode compiles as a new process does, the others as one
    that knows the program's operators.
    """
    for mode in modes:
        saved = mock.Mock(wraps=GraphLowering.save_output_code)  # others may listen, too
        know_operators(mode != "default")
        try:
            with mock.patch.object(GraphLowering, "save_output_code", saved):
                _check(written, mode, on_gpu, seeds)
        except Exception as error:
            if any(reason in str(error) for reason in REFUSED):
                continue
            from stream_programs.drawn import checked
            from stream_programs.gpu import Mismatch

            kind = error.kind if isinstance(error, checked.Wrong) else type(error).__name__.lower()
            known = isinstance(error, (checked.Wrong, checked.Invalid, Mismatch))
            text = str(error) if known else "".join(traceback.format_exception(error)[-12:])
            return Verdict(kind, mode, text, "\n".join(call.args[0] for call in saved.call_args_list))
    return None


def _check(written: Written, mode: str, on_gpu: bool, seeds: int) -> None:
    program = as_program(written, "drawn")
    if on_gpu:
        from stream_programs.drawn.on_gpu import check_mode

        check_mode(program, mode, seeds)
    else:
        from stream_programs.drawn.checked import check_compiled

        # A plan knows nothing of what other regions order, what the caller's event follows, or a copy waits for.
        alone = written.fullgraph and mode == "default" and "ready" not in written.inputs and not written.host_blocks
        alone = alone and not written.loads
        check_compiled(
            program,
            None if mode == "default" else mode,
            host_waits=written.host_waits,
            trains=written.train,
            minimal=alone,
            misaligned=bool(written.misaligned),
            joined=not (written.unjoined or written.host),
        )


def shrink(spec: Spec, verdict: Verdict, on_gpu: bool, seconds: float) -> tuple[Spec, Verdict]:
    """The simplest program found in the time that fails in the same way."""
    deadline = time.monotonic() + seconds
    going = True
    while going:
        going = False
        for simpler in smaller(spec):
            if time.monotonic() > deadline:
                return spec, verdict
            found = judge(write(simpler), [verdict.mode], on_gpu)
            if found is not None and found.fault == verdict.fault:
                spec, verdict, going = simpler, found, True
                break
    return spec, verdict


TEST = '''"""Drawn by tools/fuzz ({origin}), {mode}:

{reason}
"""

from __future__ import annotations

import sys
from pathlib import Path


ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "test" / "form.py").is_file())
sys.path.insert(0, str(ROOT / "test"))
import form  # noqa: F401
from stream_programs.drawn.trial import judge
from stream_programs.drawn.writer import Written


PROGRAM = """\\
{program}"""

{marks}
def test_{name}() -> None:
    written = Written(PROGRAM, **{facts})
    verdict = judge(written, ["{mode}"], on_gpu={on_gpu})
    assert verdict is None, verdict.text
'''


def as_test(written: Written, verdict: Verdict, origin: str, name: str, on_gpu: bool) -> str:
    """A test that fails as long as the program does. It may lie anywhere below the repository."""
    facts = {name: value for name, value in asdict(written).items() if name != "text"}
    reason = textwrap.shorten(verdict.text.replace("\\", "/").replace('"""', "'''"), 1500, placeholder=" ...")
    return TEST.format(
        origin=origin,
        mode=verdict.mode,
        reason=textwrap.fill(f"{verdict.kind}: {reason}", 116),
        program=written.text,
        marks="import pytest\n\n\n@pytest.mark.gpu" if on_gpu else "",
        name=name,
        on_gpu=on_gpu,
        facts=facts,
    )
