"""Decides which compiled code gets a relaunched graph, reports why other code gets none, and wraps it: the policy that
Inductor asks (`torch._inductor.config.cudagraph_policy`).

Inductor asks for each graph that it has just compiled or loaded: `should_wrap`, then `cudagraphify`, and at last
`wrap_output`. A policy gets generated code as a whole; its partitions are in there, one function each, and get a
`Runner` each. The compiled graph is handed to `should_wrap` and `wrap_output` only, so it is kept, for the thread,
until the last of the three.

Note [Nobody is left without a graph or a reason]
Code that asked for a graph is followed from `should_wrap`, before which Inductor may have decided against graphs, to a
`Runner`, which makes a graph or refuses. A decision of Inductor's counts as a refusal like ours, whoever logs it. Two
kinds of code need no graph, and get no refusal: code without a kernel, and code for the host. Inductor has one switch
for a forward and its backward, because trees need graphs of both or of neither. Our graphs are independent: the switch
is turned on again when the forward is refused, so that the backward gets its own decision.

Note [Collectives]
A kernel of a communication library finds its buffers in memory that the library keeps, not in its parameters, and the
library may register a buffer with its peers when it sees a capture. The proof can't see such addresses. So collectives
are split off, between graphs: they run as compiled, and their order across ranks is that of the program. Where code
can't be split, or an operator of the user's contains a collective, there is no graph.

Note [What a policy can't do]
The policy works by itself. What comes before there is compiled code is out of its reach, and is done where code is
compiled (`notes`, `rewrites`):

1. Where code is cut. Inductor itself doesn't split off collectives, `torch.cond`, and operators in which a capture
   failed; a region with them is refused, the whole code for `torch.cond`, for nothing in it captures both branches.
   Inductor does cut at operators that the user names in `custom_should_partition_ops`.
2. What the FX graph says. Which numbers no size depends on: each value of a number gets a graph of its own. What was
   split off, why, and how many kernels a partition has: `coverage` counts calls alone. Which outputs are saved for the
   backward, where the code comes from AOTAutograd's cache: they don't share memory then (`memory.outputs`).
3. Rewrites of the FX graph, and a buffer of its own for each intermediate result, without which little of a graph can
   run side by side.
4. Operators that a capture has to deceive. Streams of the caller's are replaced by those of the capture, and the
   operators of attention take their seeds where they are (Note [Seeds of attention]). Code with streams, and training
   code with these operators, is refused.
5. Reasons of code that doesn't come here: with a C++ wrapper, Inductor asks for no graph at all.
6. Inductor's switch, where the code of a refused forward comes from a cache: the switch that turns the backward off
   isn't in sight. And where a bisector (`torch._inductor.compiler_bisector`) turns off a backward alone, Inductor asks
   for trees that there aren't, and raises.
7. The preparation of the first capture while kernels are compiled: it is a part of the first call.
8. Statistics of the allocator: they list the pools of all captures (`capture.recording`).
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, TYPE_CHECKING

from torch._inductor.cudagraph_utils import CUDAGraphPolicy

from torch_overlay import config
from torch_overlay._inductor import profiler_ranges
from torch_overlay._inductor.relaunch import attention_seeds, coverage, notes
from torch_overlay._inductor.relaunch.capture.allocations import names_in
from torch_overlay._inductor.relaunch.causes import CAUSES, CodeFacts, Kind, refuse, Refused
from torch_overlay._inductor.relaunch.notes import compiled_frame, describe, describe_partition, describe_whole
from torch_overlay._inductor.relaunch.runners import on_reset


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch._inductor.output_code import CompiledFxGraph

    from torch_overlay._inductor.relaunch.rewrites.resident import Residents

SPLIT_ATTENTION = (
    "attention is split off by torch._inductor.config.custom_should_partition_ops = "
    '["aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_efficient_attention_backward"]'
)
CAUSES["policy-alone"] = Kind(
    "the caller's streams, or memory-efficient attention in training, with a policy alone", SPLIT_ATTENTION
)


# Names in generated code: of what uses the caller's streams, and of operators with seeds.
STREAMS = frozenset(["_get_stream_by_index", "streams"])
ATTENTION = frozenset([*attention_seeds.OPERATORS, *attention_seeds.FORWARDS])


class _Thread(threading.local):
    graph: Any = None  # the CompiledFxGraph between should_wrap and wrap_output
    record: Any = None  # its coverage.CompiledCode, if it asked for graphs
    is_wrapped = False  # did Inductor ask for graphs of it?
    residents: Residents | None = None  # of code that asked for graphs


_thread = _Thread()


class RelaunchPolicy(CUDAGraphPolicy):
    """Relaunched graphs for each partition of compiled code. It has no state: one object serves all functions and
    threads."""

    results_are_callers = True  # a launch allocates them as code without a graph does, for which code is generated

    def should_wrap(self, compiled_graph: Any) -> bool:
        """Return False for code of which Inductor makes no graph, after a refusal that says why."""
        record, reasons = None, getattr(compiled_graph.cudagraph_info, "cudagraph_fail_reasons", None)
        if _thread.residents is not None or is_asked(compiled_graph):
            found = notes.CompiledNotes.of(compiled_graph)
            rewritten = found.rewrites.made, _thread.residents
            record = coverage.CompiledCode(describe_whole(compiled_graph), found.partitions, *rewritten)
            if (why := why_not(compiled_graph)) is not None:
                record.without = Refused.of(*why, region=record.code)
                refuse(record.without)
        _thread.graph, _thread.record, _thread.is_wrapped = compiled_graph, record, False
        if compiled_graph.disabled_cudagraphs_reason:
            return True  # Inductor logs it, and turns its switch off
        return not reasons and (record is None or record.without is None)

    def cudagraphify(
        self,
        model: Callable[..., Any],
        example_inputs: Sequence[Any],
        static_input_idxs: Sequence[int],
        **kwargs: Any,
    ) -> Callable[..., Any]:
        """Return the code with a `Runner` around each partition, or around the whole where it isn't partitioned."""
        graph, _thread.is_wrapped = _thread.graph, True
        if kwargs.get("kernel_free_cudagraph"):
            return model
        if not _is_partitioned(graph):
            return _wrap(model, describe(graph, static_input_idxs, **kwargs), 0, **kwargs)
        if not graph.partition_maps:
            return model  # operations on streams are all of it

        def wrapping(number: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            code = describe_partition(graph, number, static_input_idxs, **kwargs)
            name = code.name if config.nvtx is True and len(graph.partition_maps) > 1 else ""
            return lambda partition: profiler_ranges.within(name, _wrap(partition, code, number, **kwargs))

        graph.recursively_apply_fns([wrapping(number) for number in range(len(graph.partition_maps))])
        return model

    def wrap_output(self, output_code: Any) -> Any:
        """Have the calls of code without a graph counted, and Inductor's switch turned on again."""
        graph, record, is_wrapped = _thread.graph, _thread.record, _thread.is_wrapped
        if graph is not output_code:
            return output_code
        forget()
        if record is None:
            return output_code
        if record.without is None and not is_wrapped and _launches(graph):
            record.without = Refused.of("inductor", "Inductor disabled it for this code", region=record.code)
            refuse(record.without)
        elif record.without is not None and "cudagraphs" in graph.fx_kwargs:
            graph.fx_kwargs["cudagraphs"].value = True
        if record.without is not None:
            graph.current_callable = record.without_graph(graph.current_callable, record.without)
        return output_code


@on_reset
def forget() -> None:
    """Drop what the thread knows of the graph that is being wrapped: for one whose wrapping ended with an error."""
    _thread.graph = _thread.record = None


def is_set() -> bool:
    """True if code that asks for CUDA graphs gets relaunched ones."""
    import torch._inductor.config as inductor_config

    return isinstance(inductor_config.cudagraph_policy, RelaunchPolicy)


@contextlib.contextmanager
def wrapping(compiled: CompiledFxGraph, switch: Any, residents: Residents) -> Iterator[None]:
    """Have compiled code finished inside. If it asked for relaunched graphs, note its copies of inputs, and turn
    Inductor's switch on at the end, which a forward and its backward share: Note [Nobody is left without a graph or a
    reason]."""
    before, is_ours = _thread.residents, is_set() and bool(switch or is_asked(compiled))
    if is_ours:
        _thread.residents = residents
    try:
        yield
    except BaseException:
        forget()
        raise
    finally:
        _thread.residents = before
    if is_ours:
        switch.value = True


def is_asked(compiled: CompiledFxGraph) -> bool:
    """True if code asked for graphs, and Inductor may have decided against them since."""
    import torch._inductor.config as inductor_config

    decided = inductor_config.triton.cudagraphs and compiled.disabled_cudagraphs_reason
    return compiled.cudagraph_info is not None or bool(decided)


# What the user can change, by a phrase of Inductor's message.
ADVICE = {
    "incompatible op": "torch._inductor.config.graph_partition = True splits it off",
    "storage mutation": "take set_() and resize_() of an input out of the compiled function",
    "mutated inputs": "torch._inductor.config.triton.cudagraph_support_input_mutation = True allows it",
    "multiple devices": "compile the code of each device by itself",
    "non-Tensor inputs": "pass tensors",
}


def why_not(compiled: Any) -> tuple[str, str] | None:
    """Return the reason code and text for Inductor making no graph of code that asked for one; None if it makes one, or
    the code has nothing to launch."""
    if not _launches(compiled):
        return None
    said = compiled.disabled_cudagraphs_reason or ", ".join(
        getattr(compiled.cudagraph_info, "cudagraph_fail_reasons", None) or ()
    )
    if said:
        text = said.partition("Found from")[0].strip().rstrip(".")
        for start in ("skipping cudagraphs due to ", "disabling cudagraphs due to "):
            text = text.removeprefix(start)
        advice = [advice for about, advice in ADVICE.items() if about in text]
        return "inductor", "; ".join([text, *advice])
    if _is_partitioned(compiled) and not compiled.partition_maps:
        rows = notes.CompiledNotes.of(compiled).partitions.split_off
        if rows and not any(row.kernels for row in rows):
            return None
        reasons = "; ".join(dict.fromkeys(row.message for row in rows))
        message = f"all of it is split off: {reasons or 'Inductor does not say why'}"
        return "split", f"{message}. What stands between such operations in one function would get a graph"
    return None


def own_buffers(graph: Any) -> bool:
    """True if each buffer of an inference graph is to have its own memory. If a kernel wrote a buffer that another
    kernel has read, the two couldn't run side by side; and a capture packs the buffers itself, into as little memory.
    """
    import torch._inductor.config as inductor_config

    asked = inductor_config.triton.cudagraphs and config.cudagraph_concurrency
    return bool(asked and graph.is_inference and "cuda" in graph.device_types)


def refuse_cpp_wrapper() -> None:
    """Report that code with a C++ wrapper gets no graph, since Inductor turns graphs off before there is any code."""
    message = "torch._inductor.config.cpp_wrapper is on, and such code can't be cut into partitions; turn it off"
    refuse(Refused.of("cpp-wrapper", message, region=CodeFacts(compiled_frame(), device=0)))


def _launches(compiled: Any) -> bool:
    """True if the code may launch kernels."""
    from torch._inductor.utils import is_gpu

    return not compiled.kernel_free_cudagraph and any(map(is_gpu, compiled.device_types))


def _is_partitioned(graph: Any) -> bool:
    import torch._inductor.config as inductor_config

    return inductor_config.graph_partition and getattr(graph, "partition_maps", None) is not None


def _wrap(
    model: Callable[..., Any], code: CodeFacts, number: int, *, is_inference: bool = False, **_: Any
) -> Callable[..., Any]:
    from torch_overlay._inductor.relaunch.runner import Runner

    record = _thread.record
    if (why := _is_alone(model, is_inference)) is not None:
        found = Refused.of("policy-alone", f"with a policy alone {why}", region=code)
        refuse(found)
        if record is not None:
            record.without = found
        return model
    made = Runner(model, code)
    if record is not None:
        record.add(made, number)
    return made


def _is_alone(model: Callable[..., Any], is_inference: bool) -> str | None:
    """Return what would go wrong in a graph of generated code, if it was compiled without notes."""
    names = names_in(model)
    if notes.CompiledNotes.find(_thread.graph) is not None:
        return None
    if not STREAMS.isdisjoint(names):
        return "work on streams of the caller's would not be captured"
    if not is_inference and not ATTENTION.isdisjoint(names):
        return "seeds of attention would be where the operators don't expect them"
    return None
