"""Write the aligned copies of inputs inside a planned region.

Inductor compiles kernels for inputs that are aligned to 16 bytes, and an input that isn't is copied at a call. Upstream
writes the copy before the lines of its first reader, and one for each stream if several read.

Note [Aligned copies and the caller's memory]
An aligned copy reads the caller's memory like the kernel that it is made for: after that kernel's waits, on its stream.
An operation that only names a tensor, as `record_stream` does, or takes its layout from it, as `randn_like`, reads
nothing, makes no copy, and takes the caller's tensor, which is kept for `record_stream` under the name `arg_orig`. The
graph returns the caller's tensor, too, and views of it that the caller gets: the backward makes its own copy.

A call that returns a view (`view_as_real`, any view of complex numbers) is made of the caller's tensor as well: it
stands before the waits of the view's readers, and readers on several streams share it. The kernels that read such a
view are compiled without any alignment.

For an input that the graph writes, upstream's runtime makes the copy before the call and writes it back after the call,
on the caller's stream: before the waits of the user, and after the records. Here such an input is copied like the
others, and each operation that writes it is followed by a copy into the caller's memory on its stream. A wait for the
operation also waits for that copy, and a reader on another stream makes its own copy of the caller's memory again.
"""

from __future__ import annotations

import re
from typing import Any, TYPE_CHECKING

import torch
from torch._inductor import ir
from torch._inductor.dependencies import WeakDep
from torch._inductor.virtualized import V

from torch_overlay._functorch.streams.ids import callers_device, CALLERS_STREAM
from torch_overlay._inductor.notes import GraphNotes
from torch_overlay._inductor.scheduler_nodes import owner_of, stream_operation, viewed_by_call


if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

    from torch_overlay._inductor.streams.emitter import RegionEmitter

_LAYOUT_ONLY = re.compile(r"aten::(new_\w+|\w+_like)")
_RUNTIME = "from torch_overlay._inductor.streams.runtime import aligned, write_back"


def named_inputs(scheduler: Scheduler) -> set[str]:
    """Return the inputs that the user's `record_stream` names, and those that a call returns a view of, in whatever
    region of the graph.
    """
    found: set[str] = set()
    for node in scheduler.nodes:
        overload = stream_operation(node)
        if overload is not None and overload._schema.name == "streams::record_stream":
            found.update(dependency.name for dependency in node.read_writes.reads)
        found |= viewed_by_call(node.node)
    return found


def _assume_unaligned_views(scheduler: Scheduler, inputs: Container[str]) -> None:
    """Have kernels that are generated from now on read views that calls return of these inputs without any
    alignment.
    """
    for name, buffer in scheduler.name_to_buf.items():
        aliases = isinstance(buffer.node, (ir.FallbackKernel, ir.MultiOutput)) and buffer.get_aliases()
        if aliases and owner_of(name) in inputs:
            V.graph.unaligned_buffers.add(name)


def returned_inputs() -> tuple[set[str], set[str]]:
    """Return the inputs that the graph returns, and those of which it saves a view for the backward, which takes the
    view to be aligned.
    """
    inputs, views, shown = set(), set(), shown_views()
    for position, value in enumerate(map(_unboxed, V.graph.graph_outputs)):
        if isinstance(value, ir.InputBuffer):
            inputs.add(value.get_name())
        elif isinstance(value, ir.BaseView) and position not in shown:
            views.add(value.get_name())
    return inputs - views, views


def shown_views() -> dict[int, ir.ReinterpretView]:
    """Return the views that the caller gets, by their positions among the graph's outputs."""
    graph: Any = V.graph
    visible = graph.module.graph.output_node().meta.get("user_visible_output_idxs", ())
    values = {position: _unboxed(graph.graph_outputs[position]) for position in visible}
    return {position: value for position, value in values.items() if isinstance(value, ir.ReinterpretView)}


def _unboxed(value: Any) -> Any:
    while isinstance(value, (ir.TensorBox, ir.StorageBox)):
        value = value.data
    return value


def _takes_layout(node: BaseSchedulerNode) -> bool:
    """True if the operator takes the layout of a tensor, and none of its values."""
    overload = getattr(node.node, "op_overload", None)
    return isinstance(overload, torch._ops.OpOverload) and bool(_LAYOUT_ONLY.fullmatch(overload._schema.name))


class AlignedInputs:
    """The aligned copies of one region's inputs, while its lines are written."""

    def __init__(self, emitter: RegionEmitter) -> None:
        self.emitter, self.wrapper = emitter, emitter.wrapper
        graph: Any = V.graph
        checked = {graph.graph_input_names[i]: i for i in graph.inputs_to_check or ()}
        self.named = named_inputs(emitter.scheduler) if checked else set()
        self.named.update(view.get_name() for view in shown_views().values())
        _assume_unaligned_views(emitter.scheduler, checked)
        self.written = self.handled(checked)
        if self.written:
            GraphNotes.of(graph).unchecked |= {checked[name] for name in self.written}
        self.due: list[str] = []  # inputs that the last node has written
        self.stream = 0  # stream of the last node

    def handled(self, checked: Mapping[str, int]) -> set[str]:
        """Return the inputs whose copies are written here; upstream writes those of the others."""
        return {name for name, i in checked.items() if i in V.graph.mutated_input_idxs}

    def copy(self, copy_read: Callable[[Sequence[str], int], None], node: BaseSchedulerNode, number: int) -> None:
        """Write the copies of what a node reads and writes, before its lines. `number` is upstream's number of the
        node's stream, and `copy_read` upstream's function, which copies inputs that are only read.
        """
        if stream_operation(node) is not None or _takes_layout(node):
            return
        if viewed := viewed_by_call(node.node):
            for name in self.wrapper._alignment_aligned_stream.keys() & viewed:
                del self.wrapper._alignment_aligned_stream[name]
                self.write_original(name)
            return
        real = self.emitter.scheduler.mutation_real_name
        reads = [real.get(d.name, d.name) for d in node.read_writes.reads if not isinstance(d, WeakDep)]
        outputs = [output for output in node.get_outputs() if not output.is_ordering_only()]
        writes = dict.fromkeys(real.get(name, name) for output in outputs for name in output.get_mutations())
        names = dict.fromkeys([*reads, *writes])
        # A copy must not replace the last reference to memory that another stream waits for, or that is named again.
        late = self.emitter.plan.release
        self.wrapper.mark_multistream_alignment([n for n in names if number or n in self.named or n in late])
        copy_read([name for name in names if name not in self.written], number)
        op = self.emitter.plan.ops[self.emitter.region.index[node]]
        self.due = [name for name in writes if name in self.written]
        self.stream = op.stream if op.stream is not None else CALLERS_STREAM
        wrapper = self.wrapper
        for name in names:
            if name in self.written and wrapper._alignment_aligned_stream.get(name) != number:
                wrapper._alignment_aligned_stream[name] = number
                if name not in wrapper._alignment_orig_saved:
                    wrapper._alignment_orig_saved.add(name)
                    self.write_name(name)
                self.write_copy(name)

    # -- statements

    def original(self, name: str) -> str:
        """Return the name of the caller's tensor, of which there may be a copy."""
        return f"{name}_orig"

    def write_name(self, name: str) -> None:
        self.emitter.write(f"{name}_orig = {name}")

    def write_copy(self, name: str) -> None:
        self.emitter.require(_RUNTIME)
        self.write(f"{name} = aligned({name}_orig")

    def write_original(self, name: str) -> None:
        """Have the name stand for the caller's tensor from now on."""
        self.emitter.write(f"{name} = {name}_orig")

    def write_original_alone(self, name: str) -> None:
        self.emitter.write(f"{name} = {name}_orig; del {name}_orig")

    def write_leaving_copy(self, name: str) -> None:
        """Write that the caller's stream uses a copy that the graph returns."""
        caller = self.emitter.stream(CALLERS_STREAM)
        self.emitter.write(f"if {name} is not {name}_orig: {name}.record_stream({caller})")

    def shown(self, name: str) -> str:
        """Return the name of the caller's tensor after the region."""
        return self.original(name)

    def write_copy_back(self, name: str) -> None:
        self.write(f"if {name} is not {name}_orig: write_back({name}_orig, {name}")

    def write_back(self) -> None:
        """Copy what the last node has written into the caller's memory."""
        for name in self.due:
            self.write_copy_back(name)
        self.due = []

    def write(self, call: str) -> None:
        """Write a call, with its side stream as an argument: the current stream isn't switched for a call that needs
        its stream only where an input isn't aligned.
        """
        if callers_device(self.stream) is None:
            self.emitter.write(f"{call}, {self.emitter.stream_of_call(self.stream)})")
        else:
            self.wrapper.writeline(f"{call})")

    def leave(self, goes_on: bool) -> None:
        """Restore the names of what the graph returns, and of what other regions of the wrapper use, to the caller's
        tensors.
        """
        wrapper = self.wrapper
        returned, viewed = (set(), set()) if goes_on else returned_inputs()
        for name, number in list(wrapper._alignment_aligned_stream.items()):
            if number and name in viewed and name in wrapper._alignment_orig_saved:  # a side stream's memory leaves
                self.write_leaving_copy(name)
            if name in wrapper._alignment_orig_saved and (goes_on or name in returned):
                del wrapper._alignment_aligned_stream[name]
                wrapper._alignment_orig_saved.discard(name)
                self.write_original_alone(name)
        for position, view in shown_views().items():
            if (name := view.get_name()) in wrapper._alignment_orig_saved:
                callers = ir.InputBuffer(name=self.shown(name), layout=view.data.get_layout())
                V.graph.graph_outputs[position] = ir.ReinterpretView(data=ir.StorageBox(callers), layout=view.layout)


def left_to_runtime(graph: Any, inputs_to_check: Sequence[int]) -> Sequence[int]:
    """Return those of the inputs whose alignment upstream checks that planned regions neither take over nor need
    aligned.
    """
    ours = GraphNotes.of(graph).unchecked
    return [i for i in inputs_to_check if i not in ours] if ours else inputs_to_check
