"""Decides which saved activations go to the host, and has both graphs rewritten."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from torch_overlay._functorch.offload import log as offload_log
from torch_overlay._functorch.offload.candidates import Pair
from torch_overlay._functorch.offload.checkpoint_policies import MUST, OFFLOAD
from torch_overlay._functorch.offload.device_rates import Rates, rates
from torch_overlay._functorch.offload.pinned_memory import gigabytes, size_text
from torch_overlay._functorch.offload.plan import Choice, choose
from torch_overlay._functorch.offload.reader import nbytes, tensor_of
from torch_overlay._functorch.offload.rewrite import rewrite
from torch_overlay._functorch.offload.runtime import check_host_memory, OffloadError


if TYPE_CHECKING:
    from torch.fx import GraphModule

    from torch_overlay._functorch.offload.settings import Settings

log = logging.getLogger(__name__)


def offload(forward: GraphModule, backward: GraphModule, count: int, wanted: Settings | None, at_once: bool) -> None:
    """Rewrite the graphs if the option or a checkpoint policy asks for it. Raise OffloadError if the option is strict
    and its budget can't be met, or if the host lacks the memory and the option is strict or a policy alone asks.
    `at_once`: see `Pair.model`."""
    pair = Pair(forward, backward, count)
    least = wanted.min_bytes if wanted is not None else 1 << 62
    known = rates(pair.device.index or 0) if pair.device is not None else None
    candidates = pair.candidates(least, known) if known is not None else []
    for owner, why in pair.refused.items():
        if any(n.meta.get(OFFLOAD) == MUST for n in (owner, *pair.saved[owner].members)):
            log.warning("%s stays on the device, though it was asked to go to the host: %s", owner, why)
    if known is None or wanted is None and not candidates:
        return
    budget = _budget(wanted, forward, backward, pair)
    choice = choose(pair.model(candidates, known, at_once), budget, known.link)
    if wanted is not None and choice.peak > budget and not _tolerates(wanted, choice, budget, pair):
        return
    if not choice.chosen:
        return
    try:
        check_host_memory(choice.nbytes)
    except OffloadError as error:
        if wanted is None or wanted.strict:
            raise
        log.warning("%s Training goes on without offload.", error)
        return
    limit = max(budget, choice.peak) if wanted is not None else choice.peak
    size = rewrite(pair, choice, limit, wanted is None or wanted.strict)
    offload_log.publish(_report(pair, choice, budget, size, known))


def _budget(wanted: Settings | None, forward: GraphModule, backward: GraphModule, pair: Pair) -> int:
    if wanted is None:
        return 1 << 62  # only what policies ask for is offloaded
    if wanted.budget is not None:
        return wanted.budget
    return free_bytes(pair.device, _parameter_bytes(backward))


def _parameter_bytes(backward: GraphModule) -> int:
    """Return the bytes of the gradients: an optimizer may allocate twice as much after the first step."""
    (output,) = backward.graph.find_nodes(op="output")
    values = [tensor_of(n) for n in torch.utils._pytree.tree_leaves(output.args[0])]
    return sum(nbytes(v) for v in values if v is not None)


def free_bytes(device: torch.device | None, reserve: int) -> int:
    """Return the bytes that the device has free, with the allocator's cached memory; less a tenth, and less twice the
    `reserve`, for an optimizer's state that may not be allocated yet."""
    free, total = torch.cuda.mem_get_info(device)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    allowed = min(free + unused, int(total * fraction) - torch.cuda.memory_allocated(device))
    return max(0, int(0.9 * allowed) - 2 * reserve)


def _tolerates(wanted: Settings, choice: Choice, budget: int, pair: Pair) -> bool:
    """True to offload as much as possible, though it is not enough. Raise OffloadError if the budget is strict."""
    reasons = sorted({why for why in pair.refused.values()})
    rest = f" Not offloaded: {len(pair.refused)} saved tensors ({'; '.join(reasons)})." if reasons else ""
    text = (
        f"activation_offload: a budget of {size_text(budget)} is too small for this function: with every saved "
        "activation that can go to the host there, its forward and backward hold "
        f"{size_text(choice.least)} at their peak ({size_text(choice.peak_before)} without offload).{rest} "
        f"Set budget_gb to {gigabytes(choice.least)} or more, or make the batch smaller."
    )
    if wanted.budget is None:  # "auto": as far as possible
        log.warning("%s As much as can be is offloaded.", text)
        return True
    if wanted.strict:
        raise OffloadError(text)
    log.warning("%s Training goes on without offload.", text)
    return False


def _report(pair: Pair, choice: Choice, budget: int, size: int, known: Rates) -> offload_log.OffloadReport:
    by_name = {owner.name: saved for owner, saved in pair.saved.items()}
    rows = []
    for name in choice.chosen:
        node = by_name[name].node
        rows.append(
            offload_log.OffloadedTensor(name, nbytes(by_name[name].value), str(node.meta.get("stack_trace") or ""))
        )
    return offload_log.OffloadReport(tuple(rows), choice, budget, size, known)
