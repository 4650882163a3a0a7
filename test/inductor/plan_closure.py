"""What a plan orders, by reachability over all pairs and without clocks, and random schedules to plan."""

import dataclasses

from hypothesis import strategies as st

import form  # noqa: F401
from token_text import token as token_of, tokens as tokens_of
from torch_overlay._functorch.streams.tokens import state as state_of, streams_of
from torch_overlay._inductor.streams.plan import Buffer, CALLER, ENTRY, Event, HOST, Op, Plan
from torch_overlay._inductor.streams.planner import plan_streams


def happens_before(plan, events):
    """Reachability over the launches, the entry and exit of each stream, and the caller's events, as sets of
    predecessors.

    Points: ("op", i), ("entry", stream), ("exit", stream), ("token", name). Works on the events alone, not on clocks.
    """
    count = len(plan.ops)
    waits = {}  # (position, stream) -> records
    for e in events:
        for position, stream in e.waits:
            waits.setdefault((position, stream), []).append((e.after, e.stream))
    boundary = {}
    for w in plan.boundary_waits:
        if all(op.rerecords != w.token for op in plan.ops[: w.before]):  # else the event stands for something else
            boundary.setdefault((w.before, w.stream), []).append(w.token)
    streams = set(plan.streams) | {s for op in plan.ops for s in streams_of(op.promised_to)}
    streams.add(CALLER)
    state = {s: {("entry", s)} for s in streams}
    for stream, tokens in plan.known.items():
        state.setdefault(stream, {("entry", stream)}).update(("entry", s) for s in streams_of(tokens))
    state[HOST] = set()
    done = {}
    entry_state = {s: frozenset(state[s]) for s in streams}

    def arrive(position, stream):
        for after, source in waits.get((position, stream), ()):
            state[stream] |= entry_state[source] if after == ENTRY else done[after]
        for token in boundary.get((position, stream), ()):
            state[stream].add(("token", token))

    for i, op in enumerate(plan.ops):
        if op.stream is None:
            continue
        state.setdefault(op.stream, {("entry", op.stream)})
        if op.stream != HOST:
            state[op.stream] |= state[HOST]
        for s in {s for position, s in boundary if position == i} - {op.stream}:
            state.setdefault(s, {("entry", s)})
            arrive(i, s)
        arrive(i, op.stream)
        if op.waits:
            waited = streams_of(op.after)
            state[op.stream] |= {("entry", s) for w in waited for s in (w, *streams_of(plan.known.get(w, ())))}
            state[op.stream] |= {("token", t) for t in op.after if t.stream is None}
            for j in range(i):
                if set(plan.ops[j].promised_to) & set(op.requires) and j in done:
                    state[op.stream] |= done[j]
        state[op.stream].add(("op", i))
        done[i] = frozenset(state[op.stream])
        if op.blocking:
            state[HOST] |= done[i]
    for s in sorted(streams):
        state[s] |= state[HOST]
        arrive(count, s)
        done[("exit", s)] = frozenset(state[s])
    done[("exit", HOST)] = frozenset(state[HOST])
    return done


def at_exit(done, stream):
    """All that a stream is ordered after at the exit; one without work of the region is ordered after the host."""
    return done.get(("exit", stream), done[("exit", HOST)])


def obligations(plan, buffers, done):
    """Every (earlier point, later point) that must be ordered, found by looking at all pairs.

    A block comes after what its stream did last, but a record of an event uses no block: it counts only if the stream
    comes after something new there, by what is `done` at each point.
    """
    members = {}
    taken = {}
    accesses = []
    found = set()
    fresh = {v: b for b in buffers if b.fresh for v in (b.name, *b.views)}
    last_on, latest = {}, {}  # of each stream, what uses blocks or brings something new, and whatever it is
    for i, op in enumerate(plan.ops):
        if op.stream is None:
            parts = frozenset().union(*(members.get(n, frozenset((n,))) for n in op.reads | op.writes))
            for n in op.writes:
                members[n] = parts
                if not op.reads and n in fresh:  # it is allocated here
                    taken.setdefault(fresh[n].name, last_on.get(fresh[n].stream))
            continue
        reads = frozenset().union(*(members.get(n, frozenset((n,))) for n in op.reads))
        writes = frozenset().union(*(members.get(n, frozenset((n,))) for n in op.writes))
        for j, r, w in accesses:
            if (w & reads) or (w & writes) or (r & writes):
                found.add((("op", j), i))
        for name in op.writes:
            b = fresh.get(name)
            if b is None or op.stream == HOST:  # the host writes no block of the device
                continue
            taken.setdefault(b.name, last_on.get(b.stream))
            first = not any(members.get(name, frozenset((name,))) & (r | w) for _, r, w in accesses)
            if op.stream != b.stream and first:
                found.add((("entry", b.stream), i))
                if taken[b.name] is not None:
                    found.add((("op", taken[b.name]), i))
        for token in op.requires:
            if not op.waits:
                found |= {(("op", j), i) for j in range(i) if token in plan.ops[j].promised_to}
        for token in op.after:
            found.add(((("entry", token.stream) if token.stream is not None else ("token", token)), i))
        accesses.append((i, reads, writes))
        at_entry = {("entry", op.stream), *(("entry", s) for s in streams_of(plan.known.get(op.stream, ())))}
        before = done[latest[op.stream]] if op.stream in latest else at_entry
        latest[op.stream] = i
        if not op.rerecords or done[i] - {("op", i)} != before:
            last_on[op.stream] = i
    for i, op in enumerate(plan.ops):
        found |= {(("op", i), ("exit", stream)) for stream in streams_of(op.promised_to)}
    for buffer in buffers:
        owner = buffer.stream if buffer.saved_on is None else buffer.saved_on
        if buffer.settles and ("exit", owner) in done:
            found |= {(use, ("exit", owner)) for use in foreign_uses(plan.ops, buffer, owner)}
    return found


def missing(plan, events, buffers):
    done = happens_before(plan, events)
    return {
        (a, b)
        for a, b in obligations(plan, buffers, done)
        if a not in done[b] and not (a[0] == "op" and plan.ops[a[1]].stream == HOST)
    }


NAMES = [f"b{i}" for i in range(6)]


@st.composite
def schedules(draw):
    """Random schedules: up to five streams, the host, blocking copies, mutations, foreign memory, boundary effects."""
    streams = draw(st.integers(2, 5))
    ops = []
    count = draw(st.integers(1, 14))
    kept = 0
    for i in range(count):
        if draw(st.integers(0, 7)) == 0:  # an allocation
            ops.append(Op(f"op{i}", None, writes=frozenset((draw(st.sampled_from(NAMES)),))))
            continue
        stream = draw(st.sampled_from([*range(streams), *range(streams), HOST]))
        reads = frozenset(draw(st.lists(st.sampled_from(NAMES), max_size=3)))
        writes = frozenset(draw(st.lists(st.sampled_from(NAMES), max_size=2)))
        after = before = requires = frozenset()
        blocking = waits = False
        rerecords = None
        if stream == HOST and draw(st.integers(0, 3)) == 0:  # a synchronisation with the device
            waits = True
            after = frozenset(
                draw(st.lists(st.sampled_from([*map(state_of, range(streams)), token_of("e9")]), max_size=3))
            )
            if draw(st.booleans()):  # the user's: it carries no data
                reads = writes = frozenset()
                after, requires = frozenset(map(state_of, range(streams))), tokens_of("h1")
        if stream != HOST:
            others = [state_of(s) for s in range(streams) if s != stream]
            after = frozenset(draw(st.lists(st.sampled_from([*others, token_of("e9")]), max_size=2)))
            before = frozenset(
                draw(st.lists(st.sampled_from([*others, *map(token_of, ("e7.0", "h0", "h1"))]), max_size=2))
            )
            blocking = draw(st.integers(0, 9)) == 0
            if kept < 2 and draw(st.integers(0, 5)) == 0:
                kept += 1
                requires, before = tokens_of("e7.0" if kept == 1 else "h0"), frozenset()
                reads = writes = frozenset()
                rerecords = draw(st.sampled_from([None, token_of("e9")]))
        ops.append(Op(f"op{i}", stream, reads, writes, after, before, requires, blocking, waits, rerecords=rerecords))
    parts = draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
    buffers = [draw_buffer(draw, n, streams) for n in draw(st.lists(st.sampled_from(NAMES), unique=True))]
    if parts:  # a concatenation of them, written in place
        position = draw(st.integers(0, count))
        ops.insert(position, Op("cat", None, frozenset(parts), frozenset(("cat",))))
        for i in draw(st.lists(st.integers(0, count), max_size=3)):
            if i > position and ops[i].stream is not None and not (ops[i].waits and ops[i].requires):
                ops[i] = dataclasses.replace(ops[i], reads=ops[i].reads | {"cat"})
        stream = draw(st.integers(0, streams - 1))
        buffers = [b for b in buffers if b.name not in parts] + [Buffer("cat", stream, views=frozenset(parts))]
    states = st.lists(st.sampled_from([state_of(s) for s in range(streams)]), max_size=2).map(frozenset)
    known = draw(st.dictionaries(st.integers(0, streams - 1), states, max_size=2))
    for _ in range(streams):  # who has waited for a stream knows what that stream does
        known = {
            s: tokens.union(*(known.get(stream, ()) for stream in streams_of(tokens))) for s, tokens in known.items()
        }
    return ops, buffers, known


def planned(schedule):
    ops, buffers, known = schedule
    return plan_streams(ops, buffers, known=known), buffers


def draw_buffer(draw, name, streams):
    """Memory of the region, or of one of two streams that came in."""
    stream, fresh = draw(st.integers(0, streams - 1)), draw(st.booleans())
    saved_on = None if fresh else draw(st.sampled_from([None, *range(streams)]))
    return Buffer(name, stream, fresh=fresh, saved_on=saved_on, settles=draw(st.integers(0, 3)) == 0)


def uses_of(ops, buffer):
    """The launches that touch a buffer, under whatever name."""
    names = {buffer.name, *buffer.views}
    return [i for i, op in enumerate(ops) if op.stream is not None and names & (op.reads | op.writes)]


def foreign_uses(ops, buffer, owner):
    return {("op", i) for i in uses_of(ops, buffer) if ops[i].stream not in (owner, HOST)}


def check_schedule(schedule):
    """The plan orders all that it must, and nothing is left over. Returns the number of its waits."""
    plan, buffers = planned(schedule)
    unordered = missing(plan, plan.events, buffers)
    assert not unordered, f"unordered: {sorted(map(str, unordered))}\n{plan.table()}"
    for what, smaller, events in without_one_wait(plan):
        assert missing(smaller, events, buffers), f"{what} is redundant\n{plan.table()}"
    return plan.num_waits


def without_one_wait(plan):
    """Each of the plans that lack one wait: what it lacks, the plan, its events."""
    for event in plan.events:
        for wait in event.waits:
            rest = tuple(w for w in event.waits if w != wait)
            events = [Event(e.index, e.after, e.stream, rest) if e.index == event.index else e for e in plan.events]
            yield f"ev{event.index} wait {wait}", plan, events
    for boundary in plan.boundary_waits:
        others = tuple(w for w in plan.boundary_waits if w != boundary)
        yield str(boundary), Plan(plan.ops, plan.events, others), plan.events
