"""Writes a program from its data: each step becomes a line or two, after the synchronisation that it needs.

    print(write(random_spec(0, 17)).text)

The text is a function that builds the function to be compiled, as those of the corpus are. Steps that ask for what
there isn't (a second value of this shape, a value that may be written in place) are left out. A program joins what it
launched at its end, or leaves some streams for the caller to join.
"""

from dataclasses import dataclass
from typing import Any

from stream_programs.drawn.operations import (
    CLAMPS,
    FILLS,
    FULL,
    InPlace,
    largest,
    LOADED,
    MORE_OPERATIONS,
    MORE_UPDATES,
    MORE_VIEWS,
    Operation,
    OPERATIONS,
    UPDATES,
    VIEWS,
)
from stream_programs.drawn.order import CURRENT, HOST, Order, Storage
from stream_programs.drawn.steps import Spec, Step


MAX_BOUND = 64.0
MAX_GAIN = 1024.0
WHOLE = "{t}.copy_({s}, non_blocking=True)"
ROWS = "{t}[4:20].copy_({s}[8:24], non_blocking=True)"
ROW = "{t}[3].copy_({s}[5], non_blocking=True)"
LISTS = "torch._foreach_copy_([{t}[2:4], {t}[8:20]], [{s}[6:8], {s}[12:24]], non_blocking=True)"
CONJUGATES = ("{a}.conj()", "{a}.mH")
ARGUMENTS = ("x", "y", "state", "z", "pinned", "out", "ready", "n")


@dataclass
class Value:
    name: str
    storage: Storage
    shape: tuple[Any, ...]
    gradient: bool = False
    gain: float = 1.0
    kind: str = "r"
    view: bool = False
    leaf: bool = False
    rows: bool = True  # laid out by rows: a transposed matrix is not, nor what takes its layout from one
    conjugated: bool = False  # a view that is

    @property
    def host(self) -> bool:
        return self.storage.stream == HOST

    @property
    def detached(self) -> str:
        """As text, without its gradient."""
        if not self.gradient:
            return self.name
        return f"[t.detach() for t in {self.name}]" if self.kind == "l" else f"{self.name}.detach()"


@dataclass(frozen=True)
class Written:
    """A program as text, and what a test has to know to run it."""

    text: str
    inputs: tuple[str, ...]
    train: bool
    random: bool
    unjoined: bool
    host: bool  # host memory is returned or written: the caller waits for the device
    fullgraph: bool
    host_waits: bool = False  # the host waits because it is told to
    host_blocks: bool = False  # the same, or because of a copy
    misaligned: int = 0  # inputs are aligned at the first call only, and lie so many elements off in others
    loads: bool = False  # the caller fills inputs on a side stream


def host_waits(text: str) -> tuple[bool, bool]:
    """`host_waits` and `host_blocks` of a program's text."""
    copies = any(call in text for call in (".cpu()", '.to("cuda")', ".item()"))
    synchronizes = "synchronize(" in text
    return synchronizes and not copies, synchronizes or copies


class Writer:
    def __init__(self, spec: Spec) -> None:
        self.spec, self.order = spec, Order(spec.streams)
        self.operations = OPERATIONS + MORE_OPERATIONS * spec.wide
        self.updates = UPDATES + MORE_UPDATES * spec.wide
        self.views = VIEWS + MORE_VIEWS * spec.wide
        self.lines: list[tuple[int, str]] = []
        self.stack: list[int] = [CURRENT]
        self.values: list[Value] = []
        self.used: set[str] = set()
        self.count = 0
        self.events = 0
        self.kept_events: set[str] = set()  # made outside of the function
        self.returned: list[Value] = []  # copies for which the host waits; compiled code makes those that are read
        self.random = self.graph_breaks = self.copies_to_host = False
        self.loader = spec.loader if spec.loader <= spec.streams else CURRENT
        if self.loader:
            self.order.clocks[self.loader] = {self.loader: 1, CURRENT: 1}
        for name in LOADED:
            self.values.append(self.given(name, spec.train and name == "x"))
        self.values[-1].kind, self.values[-1].storage.is_complex = "c", True
        self.values.append(self.given("buffer", False))
        self.values[-1].storage.persistent = True
        self.pinned = Value("pinned", Storage(HOST, 2), FULL)
        self.out = Value("out", Storage(HOST, 2), FULL)
        self.order.record("ready", CURRENT)

    def given(self, name: str, gradient: bool) -> Value:
        stream = self.loader if name in LOADED else CURRENT
        storage = Storage(stream, 2.0, writes={stream: 1}, names={name, f"the caller's {name}"})
        return Value(name, storage, FULL, gradient, leaf=gradient)

    # ---- text

    @property
    def stream(self) -> int:
        return self.stack[-1]

    def name_of(self, stream: int) -> str:
        return "current" if stream == CURRENT else f"s{stream}"

    def line(self, text: str) -> None:
        self.lines.append((len(self.stack) - 1, text))

    def use(self, *values: Value) -> None:
        self.used.update(v.name for v in values)

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def assign(self, text: str) -> str:
        """The name of a new variable."""
        name = self.fresh()
        self.line(f"{name} = {text}")
        return name

    # ---- order

    def ensure(
        self, stream: int, reads: list[Value], writes: list[Value], style: int = 0, allocates: bool = False
    ) -> None:
        """Write what orders `stream` after all that it is going to touch."""
        missing = self.order.missing(stream, [v.storage for v in reads], [v.storage for v in writes], allocates)
        self.synchronize(stream, missing, style)

    def synchronize(self, stream: int, missing: dict[int, int], style: int) -> None:
        if not missing:
            return
        events = self.order.covering(missing)
        if events and style % 3 != 2:
            self.wait_event(stream, events[style % len(events)], style)
            return
        for other in sorted(missing):
            if self.order.uncovered(stream, {other: missing[other]}):
                self.join(stream, other, style)

    def join(self, stream: int, other: int, style: int) -> None:
        a, b = self.name_of(stream), self.name_of(other)
        if stream == HOST:
            if style % 4 == 3:
                self.line("torch.cuda.synchronize()")
                for each in range(self.spec.streams + 1):
                    self.order.wait_stream(HOST, each)
            elif style % 4 == 2:
                self.wait_event(HOST, self.record(other, style), style)
            else:
                self.line(f"{b}.synchronize()")
                self.order.wait_stream(HOST, other)
        elif style % 5 in (3, 4):
            self.wait_event(stream, self.record(other, style), style)
        else:
            self.line(f"{a}.wait_stream({b})")
            self.order.wait_stream(stream, other)

    def record(self, stream: int, style: int) -> str:
        """Record an event: one made here, or one that was made outside and is recorded once more."""
        if style % 7 == 6 or (style % 7 == 5 and not self.kept_events):
            name = f"e{1 + style % 2}"
            self.kept_events.add(name)
        elif style % 7 == 5:
            name = sorted(self.kept_events)[0]
        else:
            self.events += 1
            name = f"done{self.events}"
            if style % 2:
                self.line(f"{name} = {self.name_of(stream)}.record_event()")
                self.order.record(name, stream)
                return name
            self.line(f"{name} = torch.cuda.Event()")
        if stream == self.stream and style % 3 == 0:
            self.line(f"{name}.record()")
        else:
            self.line(f"{name}.record({self.name_of(stream)})")
        self.order.record(name, stream)
        return name

    def wait_event(self, stream: int, event: str, style: int) -> None:
        self.used.add(event)
        if stream == HOST:
            self.line(f"{event}.synchronize()")
        elif stream == self.stream and style % 2:
            self.line(f"{event}.wait()")
        else:
            self.line(f"{self.name_of(stream)}.wait_event({event})")
        self.order.wait_event(stream, event)

    # ---- choosing

    def recent(self, host: bool = False, kind: str = "r") -> list[Value]:
        """The newest first."""
        return [v for v in reversed(self.values) if v.host == host and v.kind == kind]

    def choose(self, index: int, host: bool = False, full: bool = False) -> Value | None:
        found = [v for v in self.recent(host) if not full or v.shape == FULL]
        return found[index % len(found)] if found else None

    def made(self, name: str, shape: tuple[int, ...], bound: float, where: int | None = None, **fields: Any) -> Value:
        """A new value in memory of the stream, or of the host."""
        value = Value(name, Storage(self.stream if where is None else where, bound, names={name}), shape, **fields)
        self.values.append(value)
        return value

    # ---- steps

    def step(self, step: Step) -> None:
        kind, a, b, c = step
        getattr(self, f"do_{kind}")(a, b, c)

    def do_compute(self, a: int, b: int, c: int) -> None:
        operation = self.operations[a % len(self.operations)]
        operands = self.operands(operation, b, c)
        if operands is None:
            return
        self.ensure(self.stream, operands, [], style=a + b + c, allocates=True)
        text, shape, bound, gradient, gain = self.apply(operation, operands, c)
        name = self.assign(text)
        rows = operation.rows and all(o.rows for o in operands)
        value = self.made(name, shape, bound, gradient=gradient, gain=gain, rows=rows, kind=operation.gives)
        value.storage.is_complex = operation.is_complex or operation.gives == "c"
        self.finish(operation, operands, value)

    def operands(self, operation: Operation, b: int, c: int) -> list[Value] | None:
        chosen: list[Value] = []
        for index, kind in zip((b, b + c)[: operation.arity], operation.takes):
            found = [
                v for v in self.recent(kind=kind) if operation.shape(*(o.shape for o in chosen), v.shape) is not None
            ]
            if len(found) > 1 and chosen:
                found = [v for v in found if v is not chosen[0]]
            if not found:
                return None
            chosen.append(found[index % len(found)])
        shape = operation.shape(*(o.shape for o in chosen))
        if operation.gives != "r" and operation.bound(*(o.storage.bound for o in chosen)) > MAX_BOUND:
            return None  # only what is real can be clamped in an expression
        return chosen if shape is not None and len(chosen) == operation.arity else None

    def apply(
        self, operation: Operation, operands: list[Value], c: int
    ) -> tuple[str, tuple[Any, ...], float, bool, float]:
        shape = operation.shape(*(o.shape for o in operands))
        assert shape is not None
        spread = max([1.0, *(32.0 for o in operands if o.shape != shape and o.shape != FULL)])
        gain = operation.gain * spread * sum(o.gain for o in operands if o.gradient)
        detach = gain > MAX_GAIN
        names = [o.detached if detach else o.name for o in operands]
        weight = f"w{c % 2}"
        text = operation.text.format(**dict(zip("ab", names)), w=weight)
        self.use(*operands)
        if operation.weight:
            self.used.add(weight)
        self.random |= operation.random
        bound = operation.bound(*(o.storage.bound for o in operands))
        if bound > MAX_BOUND:
            text, bound = f"({text}).clamp(-2, 2)", 2.0
        own = operation.weight and self.spec.train
        gradient = operation.gradient and (own or (any(o.gradient for o in operands) and not detach))
        return text, shape, bound, gradient, max(1.0, gain if not detach else 1.0)

    def finish(self, operation: Operation, operands: list[Value], value: Value) -> None:
        self.order.launch(self.stream, [o.storage for o in operands], [value.storage])
        if self.spec.train:
            clamped = "clamp" in self.lines[-1][1]
            value.storage.saved = value.gradient and ("r" in operation.saves or clamped)
            for o in operands:
                o.storage.saved |= "o" in operation.saves or clamped

    def do_enter(self, a: int, b: int, c: int) -> None:
        if len(self.stack) > 3:
            return
        stream = a % (self.spec.streams + 1) if c % 8 == 7 else 1 + a % self.spec.streams
        self.line(f"with torch.cuda.stream({self.name_of(stream)}):")
        self.stack.append(stream)

    def do_leave(self, a: int, b: int, c: int) -> None:
        if len(self.stack) > 1:
            if self.lines[-1] == (len(self.stack) - 2, f"with torch.cuda.stream({self.name_of(self.stream)}):"):
                self.line("pass")
            self.stack.pop()

    def writable(self, value: Value, update: InPlace) -> bool:
        if value.host or value.leaf or value.storage.saved or (value.shape != FULL and value.kind != "l"):
            return False
        if value.conjugated and "view_as_real" in update.text:
            return False
        if self.spec.train:
            alone = len(value.storage.names) == 1 and not value.view
            with_gradient = any(v.gradient for v in self.values if v.storage is value.storage)
            return not with_gradient or (update.gradient and alone)
        return True

    def do_in_place(self, a: int, b: int, c: int) -> None:
        update = self.updates[a % len(self.updates)]
        found = [v for v in self.recent(kind=update.takes[0]) if self.writable(v, update)]
        if "out=" in update.text or "scaled_into" in update.text:
            found = [v for v in found if v.rows and not v.view]  # Dynamo refuses what isn't contiguous
        if "add_to" in update.text:
            found = [v for v in found if not v.storage.is_complex]
        if not found:
            return
        target = found[b % len(found)]
        operands: list[Value] = []
        if update.arity == 2:
            others = [v for v in self.recent(kind=update.takes[1]) if v.shape == target.shape]
            others = [v for v in others if v.storage is not target.storage]
            if not others:
                return
            operands = [others[c % len(others)]]
        bound = update.bound(target.storage.bound, *(o.storage.bound for o in operands))
        limit = 2.0 if target.storage.persistent or target.name in ARGUMENTS else MAX_BOUND
        clamp = bound > limit
        self.ensure(self.stream, [target, *operands], [target], style=a + b + c, allocates=True)
        names = [o.name if target.gradient else o.detached for o in operands]
        text = update.text.format(**dict(zip("ab", [target.name, *names])))
        self.line(text)
        if clamp:
            for text in CLAMPS[target.kind]:
                self.line(text.format(a=target.name))
            if target.gradient:
                # What clamp_ saves is its own input's mask; the value must not be written again.
                target.storage.saved = True
        target.storage.bound = max(2.0 if clamp else bound, 0.0 if not update.chains else 0.0)
        self.use(target, *operands)
        if target.gradient:
            target.gain = min(MAX_GAIN, 2 * (target.gain + sum(o.gain for o in operands)))
        self.order.launch(self.stream, [o.storage for o in operands], [target.storage])

    def do_fill(self, a: int, b: int, c: int) -> None:
        """Memory that one stream allocates, and another one, or the same, writes first."""
        source = self.choose(b, full=True)
        if source is None:
            return
        self.ensure(self.stream, [], [], style=a, allocates=True)
        name = self.assign('torch.empty(32, 32, device="cuda")')
        value = self.made(name, FULL, min(2 * source.storage.bound, 4.0))
        self.order.launch(self.stream, [], [value.storage])  # what had the block before is over by then
        depth = len(self.stack)
        self.do_enter(c, b, b)
        self.ensure(self.stream, [source], [value], style=a + b + c, allocates=True)
        given = source.detached if source.storage.bound <= 2 else f"{source.detached}.clamp(-2, 2)"
        fill = FILLS[a % len(FILLS)]
        self.line(fill.format(a=name, b=given))
        # Functionalization gives what `out=` fills the operand's strides, which eager doesn't.
        value.rows = source.rows or "out=" not in fill
        self.use(source)
        self.order.launch(self.stream, [source.storage], [value.storage])
        if c % 2 and len(self.stack) > depth:
            self.do_leave(0, 0, 0)

    def do_view(self, a: int, b: int, c: int) -> None:
        view = self.views[a % len(self.views)]
        found = [v for v in self.recent(kind=view.takes) if v.shape == FULL or view.takes == "l"]
        if "view_as_real" in view.text:
            found = [v for v in found if not v.conjugated]
        if not found:
            return
        base, text = found[b % len(found)], view.text
        if (view.whole and (base.view or not base.rows)) or (text == "{a}.reshape(64, 16)" and not base.rows):
            return  # it would be a copy
        if ".view(" in text and "torch" not in text and (base.view or not base.rows):
            text = text.replace(".view(", ".reshape(")
            if view.shape != FULL:
                return
        name = self.assign(text.format(a=base.name))
        self.use(base)
        base.storage.names.add(name)
        base.storage.is_complex |= view.gives == "c"
        value = Value(name, base.storage, view.shape or base.shape[1], base.gradient, base.gain, view.gives, view=True)
        value.rows, value.conjugated = base.rows and view.rows, base.conjugated != (text in CONJUGATES)
        self.values.append(value)

    def do_wait_stream(self, a: int, b: int, c: int) -> None:
        count = self.spec.streams + 1
        stream, other = a % count, b % count
        if stream != other:
            self.line(f"{self.name_of(stream)}.wait_stream({self.name_of(other)})")
            self.order.wait_stream(stream, other)

    def do_record(self, a: int, b: int, c: int) -> None:
        self.record(a % (self.spec.streams + 1) if b % 2 else self.stream, c)

    def do_wait_event(self, a: int, b: int, c: int) -> None:
        events = [name for name in self.order.events if name not in ("e1", "e2") or name in self.kept_events]
        self.wait_event(b % (self.spec.streams + 1) if c % 2 else self.stream, events[-1 - a % len(events)], c)

    def do_synchronize(self, a: int, b: int, c: int) -> None:
        self.join(HOST, b % (self.spec.streams + 1), a)

    def do_to_host(self, a: int, b: int, c: int) -> None:
        value = self.choose(b, full=True)
        if value is None or value.view:
            return
        copies = a % 3
        writes = [self.out] if copies == 2 else []
        for target in writes:  # the host itself doesn't touch it
            missing = self.order.missing(self.stream, [], [target.storage])
            self.synchronize(self.stream, missing, c)
        self.ensure(self.stream, [value], [], style=a + b + c)
        self.use(value)
        if copies == 2:
            self.line(f"out.copy_({value.detached}, non_blocking=True)")
            self.use(self.out)
            self.out.storage.bound = value.storage.bound
            self.order.launch(self.stream, [value.storage], [self.out.storage])
            self.copies_to_host = True
            return
        name = self.assign(f'{value.detached}.to("cpu", non_blocking=True)' if copies else f"{value.detached}.cpu()")
        made = self.made(name, FULL, value.storage.bound, HOST, rows=value.rows)
        self.returned.append(made)
        self.order.launch(self.stream, [value.storage], [made.storage])
        self.copies_to_host = True
        if not copies:
            self.order.wait_stream(HOST, self.stream)

    def do_copy_in(self, a: int, b: int, c: int) -> None:
        """Pinned memory is copied into a matrix, or into a part of it, and the host doesn't wait."""
        source = (self.pinned, self.out)[b % 2]
        if a % 4 == 0:
            self.ensure(self.stream, [source], [], style=c, allocates=True)
            name = self.assign('torch.empty(32, 32, device="cuda")')
            target = self.made(name, FULL, source.storage.bound)
            text = WHOLE
        else:
            update = InPlace(WHOLE, 1, largest, reads=a % 4 != 1, chains=False)
            found = [v for v in self.recent() if self.writable(v, update) and not v.gradient]
            if not found:
                return
            target = found[c % len(found)]
            text = (WHOLE, (ROWS, ROW)[b // 2 % 2], LISTS)[a % 4 - 1]
            self.ensure(self.stream, [target, source], [target], style=a + b + c, allocates=True)
        self.line(text.format(t=target.name, s=source.name))
        self.use(target, source)
        target.storage.bound = max(target.storage.bound, source.storage.bound)
        if target.storage.bound > 2.0 and (target.storage.persistent or target.name in ARGUMENTS):
            self.line(f"{target.name}.clamp_(-2, 2)")
            target.storage.bound = 2.0
        self.order.launch(self.stream, [source.storage], [target.storage])

    def do_copy_out(self, a: int, b: int, c: int) -> None:
        """A matrix is copied into pinned memory, or into a part of it, and the host doesn't wait."""
        value = self.choose(b, full=True)
        if value is None:
            return
        self.ensure(self.stream, [value], [], style=a + b + c, allocates=True)
        if a % 2:
            name = self.assign(f"torch.{'empty' if a % 4 == 1 else 'zeros'}(32, 32, pin_memory=True)")
            target = self.made(name, FULL, value.storage.bound, HOST)
            self.returned.append(target)
            text = WHOLE if a % 4 == 1 else ROWS
        else:
            target = self.out
            missing = self.order.missing(self.stream, [], [target.storage])
            self.synchronize(self.stream, missing, c)
            text = (WHOLE, ROW, LISTS)[a // 2 % 3]
        self.line(text.format(t=target.name, s=value.detached))
        self.use(value, target)
        target.storage.bound = max(target.storage.bound, value.storage.bound)
        self.order.launch(self.stream, [value.storage], [target.storage])
        self.copies_to_host = True

    def do_host_compute(self, a: int, b: int, c: int) -> None:
        value = self.choose(b, host=True)
        if value is None:
            return
        self.ensure(HOST, [value], [], style=a)
        text = ("{a} + 1", "{a} * 2", "{a}.clamp(-1, 1)")[a % 3].format(a=value.name)
        bound = (value.storage.bound + 1, 2 * value.storage.bound, 1.0)[a % 3]
        if bound > MAX_BOUND:
            text, bound = f"({text}).clamp(-2, 2)", 2.0
        made = self.made(self.assign(text), FULL, bound, HOST, rows=value.rows)
        self.use(value)
        self.order.launch(HOST, [value.storage], [made.storage])

    def do_to_device(self, a: int, b: int, c: int) -> None:
        values = [*self.recent(host=True), self.pinned]
        value = values[b % len(values)]
        wait = a % 2 == 0 or value is not self.pinned
        if wait:  # read by the host
            self.ensure(HOST, [value], [], style=c)
        self.ensure(self.stream, [value], [], style=c, allocates=True)
        flag = ", non_blocking=True" if a % 2 else ""
        name = self.assign(f'{value.name}.to("cuda"{flag})')
        self.use(value)
        made = self.made(name, FULL, value.storage.bound, rows=value.rows)
        self.order.launch(self.stream, [value.storage], [made.storage])
        if not a % 2:
            self.returned.append(made)
        if value is self.pinned and not a % 2:
            self.order.wait_stream(HOST, self.stream)

    def do_delete(self, a: int, b: int, c: int) -> None:
        kept = [*ARGUMENTS, "buffer", *(v.name for v in self.returned)]
        found = [v for v in self.values if v.name not in kept]
        if len(found) < 2:
            return
        value = found[b % len(found)]
        if value.kind == "l" and len(value.storage.names) > 1:
            return  # those of its tensors that nothing else holds would be freed
        self.line(f"del {value.name}")
        self.values.remove(value)
        value.storage.names.discard(value.name)
        if not value.storage.names:
            self.order.free(value.storage)

    def do_record_stream(self, a: int, b: int, c: int) -> None:
        value = self.choose(b)
        if value is None or value.view:
            return
        stream = a % (self.spec.streams + 1)
        self.line(f"{value.name}.record_stream({self.name_of(stream)})")
        self.use(value)
        value.storage.lent.add(stream)

    def do_branch(self, a: int, b: int, c: int) -> None:
        """A choice by a Python value; both sides are as well ordered."""
        first, second = OPERATIONS[a % 4], OPERATIONS[(a + b) % 4]
        value, other = self.choose(b), self.choose(b + c)
        if value is None or other is None or value.shape != other.shape:
            return
        self.ensure(self.stream, [value, other], [], style=a + b + c, allocates=True)
        results = [self.apply(o, [value, other][: o.arity], c) for o in (first, second)]
        name = self.assign(f"{results[0][0]} if n > {a % 5} else {results[1][0]}")
        self.used.add("n")
        taken = results[0] if a % 5 < 3 else results[1]
        gradient = any(r[3] for r in results)
        bound, gain, rows = max(r[2] for r in results), max(r[4] for r in results), value.rows and other.rows
        made = self.made(name, taken[1], bound, gradient=gradient, gain=gain, rows=rows)
        self.finish(first, [value, other], made)

    def do_loop(self, a: int, b: int, c: int) -> None:
        value = self.choose(b, full=True)
        if value is None:
            return
        self.ensure(self.stream, [value], [], style=a + b + c, allocates=True)
        name = self.assign(f"{value.name}.detach().clone()")
        self.line("for _ in range(n):")
        self.line(f"    {name} = {name}.clamp(-2, 2) + 1")
        self.used.add("n")
        self.use(value)
        made = self.made(name, FULL, max(3.0, value.storage.bound), rows=value.rows)
        self.order.launch(self.stream, [value.storage], [made.storage])

    def do_item(self, a: int, b: int, c: int) -> None:
        if c % 3:
            return
        value = self.choose(b, full=True)
        if value is None:
            return
        self.ensure(self.stream, [value], [], style=a + b + c, allocates=True)
        name = self.assign(f"int({value.name}.detach().amax().item())")
        self.use(value)
        self.order.launch(self.stream, [value.storage], [])
        self.order.wait_stream(HOST, self.stream)
        self.graph_breaks = True
        target = self.assign(f'torch.full((32, 32), 1.0 if {name} > 0 else 0.0, device="cuda")')
        made = self.made(target, FULL, 1.0)
        self.order.launch(self.stream, [], [made.storage])

    def do_graph_break(self, a: int, b: int, c: int) -> None:
        self.line("torch._dynamo.graph_break()")
        self.graph_breaks = True

    # ---- the whole

    def close(self) -> list[Value]:
        """Leave all contexts, join, and choose what is returned."""
        while len(self.stack) > 1:
            self.do_leave(0, 0, 0)
        sides = range(1, self.spec.streams + 1)
        for stream in sides:
            busy = self.order.clocks[stream].get(stream, 0)
            if busy and not (self.spec.unjoined and not self.spec.train):
                self.synchronize(CURRENT, self.order.uncovered(CURRENT, {stream: busy}), len(self.spec.steps) + stream)
        made = [v for v in self.values if v.name.startswith("v") and v.kind != "i"]  # the bits of zeros differ
        outputs = [v for v in made[:-4] if v in self.returned] + made[-4:] or self.values[:1]
        if self.spec.train and not any(v.gradient for v in outputs):
            outputs = [v for v in made if v.gradient][-1:] + outputs
        self.use(*outputs)
        return outputs

    def write(self) -> Written:
        for step in self.spec.steps:
            self.step(step)
        if self.spec.train:
            self.anchor()
        outputs = self.close()
        body = [f"{'    ' * depth}{text}" for depth, text in self.lines]
        inputs = tuple(name for name in ARGUMENTS if name in self.used)
        host = self.copies_to_host
        text = self.assemble(body, inputs, outputs)
        return Written(
            text,
            inputs,
            self.spec.train,
            self.random,
            self.spec.unjoined and not self.spec.train,
            host,
            not self.graph_breaks,
            *host_waits(text),
            # A kernel draws other numbers for a misaligned operand, and complex numbers don't begin anywhere.
            0 if self.random or not self.spec.misaligned else 2 if "view_as_complex" in text else 1,
            "loads=" in text,
        )

    def anchor(self) -> None:
        """Training needs a value with a gradient."""
        if not any(v.gradient and v.name.startswith("v") for v in self.values):
            while len(self.stack) > 1:
                self.do_leave(0, 0, 0)
            x = self.values[0]
            self.ensure(CURRENT, [x], [], allocates=True)
            name = self.assign("x @ w0")
            self.use(x)
            self.used.add("w0")
            made = self.made(name, FULL, 2 * x.storage.bound, gradient=True, gain=2.0)
            self.order.launch(CURRENT, [x.storage], [made.storage])

    def assemble(self, body: list[str], inputs: tuple[str, ...], outputs: list[Value]) -> str:
        spec = self.spec
        head = ["def build(k):"]
        text = "\n".join(body)
        for stream in range(1, spec.streams + 1):
            if f"s{stream}" in text or stream == self.loader:
                head.append(f"    s{stream} = k.stream()")
        head += [f"    {e} = torch.cuda.Event()" for e in sorted(self.kept_events)]
        weights = [w for w in ("w0", "w1") if w in self.used]
        head += [f"    {w} = weight(k{', True' if spec.train else ''})" for w in weights]
        if "buffer" in self.used:
            head.append("    buffer = k.parameter(32, 32)")
        if "sleep(" in text:
            head.append("    sleep = k.sleep")
        head += ["", f"    def fn({', '.join(inputs)}):"]
        if "current" in text:
            head.append("        current = torch.cuda.current_stream()")
        lines = [f"        {line}" for line in body]
        returned = ", ".join(v.name for v in outputs)
        lines.append(f"        return {returned}" + ("," if len(outputs) == 1 else ""))
        kept = ", [buffer]" if "buffer" in self.used else ""
        if self.loader and (loaded := [i for i, name in enumerate(inputs) if name in LOADED]):
            kept += f", loads=(s{self.loader}, {loaded})"
        if spec.train:
            given = inputs.index("x") if "x" in inputs else None
            end = f"    return trains(k, fn, {given}, [{', '.join(weights)}]{kept})"
        else:
            end = f"    return calls(k, fn{kept})"
        return "\n".join([*head, *lines, "", end]) + "\n"


def write(spec: Spec) -> Written:
    return Writer(spec).write()
