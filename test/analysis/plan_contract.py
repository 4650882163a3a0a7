"""Are the plans of compiled programs sound and minimal, by what each was asked for?

The mutants of a program's trace (`mutants`) show that the program needs an event. A plan knows its own region alone: it
orders what the region was asked to order, also where another region of the program, or the host, happens to have done
so. So each plan is held against its own request, by the closure of `test_stream_planner`, which looks at all pairs and
knows no clocks: with all of its waits nothing may be missing, and without any one of them something must be.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from plan_closure import happens_before, missing

import form  # noqa: F401
from torch_overlay._functorch.streams.tokens import Token
from torch_overlay._inductor.streams import planned_region, planner
from torch_overlay._inductor.streams.plan import Buffer, HOST, Plan


@dataclasses.dataclass(frozen=True)
class Request:
    """A plan, and what it was asked for beyond its operations."""

    plan: Plan
    buffers: tuple[Buffer, ...]
    promised: Mapping[int, frozenset[Token]]


@contextlib.contextmanager
def requests() -> Iterator[list[Request]]:
    """Collects the plans that are made inside."""
    found: list[Request] = []

    def plan_streams(ops: Any, buffers: Any = (), promised: Any = None, known: Any = None) -> Plan:
        plan = planner.plan_streams(ops, buffers, promised, known)
        found.append(Request(plan, tuple(buffers), promised or {}))
        return plan

    with mock.patch.object(planned_region, "plan_streams", plan_streams):
        yield found


def unordered(request: Request, plan: Plan) -> set[Any]:
    """What the request wants ordered, and the plan doesn't order."""
    found = missing(plan, plan.events, request.buffers)
    done = happens_before(plan, plan.events)
    for here, op in enumerate(plan.ops):
        known = done.get(here, frozenset())
        names = {other.name: i for i, other in enumerate(plan.ops[:here])}
        wanted = {("op", names[name]) for name in op.order_after if name in names}
        found |= {(point, here) for point in wanted if point not in known and plan.ops[point[1]].stream != HOST}
    for stream, tokens in request.promised.items():
        known = done.get(("exit", stream), frozenset())
        points = {("entry", t.stream) if t.stream is not None else ("token", t) for t in tokens} - {("entry", stream)}
        found |= {(point, ("exit", stream)) for point in points if point not in known}
    for buffer in request.buffers:
        if buffer.settles:
            owner = buffer.stream if buffer.saved_on is None else buffer.saved_on
            known = done.get(("exit", owner), frozenset())
            users = [i for i in plan.uses.get(buffer.name, ()) if plan.ops[i].stream not in (owner, HOST)]
            found |= {(("op", i), ("exit", owner)) for i in users if ("op", i) not in known}
    return found


def smaller(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plan without one of its waits, for each of them."""
    for event in plan.events:
        for wait in event.waits:
            rest = dataclasses.replace(event, waits=tuple(w for w in event.waits if w != wait))
            events = tuple(rest if e is event else e for e in plan.events)
            yield f"ev{event.index} waited for by {wait}", dataclasses.replace(plan, events=events)
    for boundary in plan.boundary_waits:
        others = tuple(w for w in plan.boundary_waits if w != boundary)
        yield str(boundary), dataclasses.replace(plan, boundary_waits=others)


def mistakes(found: Sequence[Request]) -> tuple[int, list[str]]:
    """How many waits the plans have, and in words what is missing and which are needless."""
    count, wrong = 0, []
    for request in found:
        if lost := unordered(request, request.plan):
            wrong.append(f"not ordered: {sorted(map(str, lost))}\n{request.plan.table()}")
        for what, plan in smaller(request.plan):
            count += 1
            if not unordered(request, plan):
                wrong.append(f"needless: {what}\n{request.plan.table()}")
    return count, wrong


__all__ = ["mistakes", "requests"]
