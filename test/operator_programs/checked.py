"""Compiles a case for the simulated GPU and asks the happens-before check for races and lost promises."""

import warnings
from typing import Any

import torch
import torch.utils._pytree as pytree

import form  # noqa: F401
from operator_programs import build, Case, DEFAULT, FOLDED, NoSample, sample, VARIANTS
from stream_programs._quiet import quiet
from stream_programs.drawn.checked import findings
from torch_overlay import config
from torch_overlay.analysis import check
from torch_overlay.analysis.race_check.race_report import Report
from torch_overlay.testing import simulated_gpu


class Unfit(Exception):
    """The case can't be asked here."""


def _on_simulated(value: Any) -> Any:
    """The argument, on the simulated device."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise Unfit("an input isn't strided")
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        return made.requires_grad_(value.requires_grad)
    if isinstance(value, torch.device) or value == "cpu":
        return "cuda"
    return value


def report(case: Case) -> Report:
    try:
        given = sample(case, "cpu")
    except NoSample as e:
        raise Unfit(str(e)) from None
    except Exception as e:
        raise Unfit(f"eager: {type(e).__name__}: {e}") from None
    threshold = config.fold_branches_below_us if case.mode == FOLDED else 0.0
    with simulated_gpu(), config.patch(fold_branches_below_us=threshold), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args, kwargs = pytree.tree_map(_on_simulated, given)
        how: dict[str, Any] = {"backward": VARIANTS[case.variant].trains}
        how["mode"] = None if case.mode == DEFAULT else "reduce-overhead"
        try:
            return check(build(case, torch.cuda.Stream()), args, kwargs, **how)
        except Exception:
            try:
                check(build(case, None), args, kwargs, **how)
            except Exception as e:
                raise Unfit(f"without streams, too: {type(e).__name__}: {e}") from None
            raise


def faults(case: Case) -> list[str]:
    """The races and the lost promises. An operator that pads may read what it doesn't use, and one that allocates may
    return it, so memory that nobody has written is no fault here.
    """
    found = report(case)
    if found.notes and not found.context.promises:
        raise Unfit(found.notes[0])
    trains = VARIANTS[case.variant].trains
    return [f"{kind}: {text}" for kind, text in findings(found, trains=trains, breaks=True) if kind in ("race", "lost")]


__all__ = ["faults", "report", "Unfit"]
