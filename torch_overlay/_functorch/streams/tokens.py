"""Name the order between a graph and the outside, as far as streams, events and the host can observe it, by tokens.

`after` of a node holds the states of the caller that the node's stream had waited for when the node was issued;
`promised_to` holds what the user ordered after the node by the end of the graph. Order between nodes is data dependence
and needs no token.

| token | printed | meaning |
|---|---|---|
| `state(1)` | s1 | stream 1 as it is when the region is entered (after) or left (before) |
| `caller_event(5)` | e5 | the caller's event 5 |
| `record(5, 0)` | e5.0 | the first record of event 5 in this graph |
| `synchronization(2)` | h2 | the third time that the host synchronises |
| `blocking_copy(3)` | c3 | the fourth copy that blocks the host |

The module is pure: it imports nothing of torch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Iterable


class Token(NamedTuple):
    """A state of a stream, an event, a record, a host synchronisation or a copy that blocks the host. `index` is the
    index of a stream or an event, or counts synchronisations and copies; `nth` counts an event's records in the graph,
    and is -1 for all other tokens.
    """

    kind: Literal["c", "e", "h", "s"]
    index: int
    nth: int = -1

    def __str__(self) -> str:
        return f"{self.kind}{self.index}" + (f".{self.nth}" if self.nth >= 0 else "")

    @property
    def stream(self) -> int | None:
        """The stream whose state the token is; None for other tokens."""
        return self.index if self.kind == "s" else None

    @property
    def event(self) -> int | None:
        """The caller's event that the token is; None for other tokens, including records of this graph."""
        return self.index if self.kind == "e" and self.nth < 0 else None

    @property
    def is_synchronization(self) -> bool:
        return self.kind == "h"

    @property
    def is_blocking_copy(self) -> bool:
        return self.kind == "c"


def state(stream: int) -> Token:
    return Token("s", stream)


def caller_event(event: int) -> Token:
    return Token("e", event)


def record(event: int, nth: int) -> Token:
    return Token("e", event, nth)


def synchronization(number: int) -> Token:
    return Token("h", number)


def blocking_copy(number: int) -> Token:
    return Token("c", number)


CALLER = state(0)
"""The state of the caller's stream."""


def streams_of(tokens: Iterable[Token]) -> set[int]:
    """Return the streams whose states are among the tokens."""
    return {t.index for t in tokens if t.kind == "s"}


def events_of(tokens: Iterable[Token]) -> set[int]:
    """Return the caller's events among the tokens."""
    return {event for t in tokens if (event := t.event) is not None}
