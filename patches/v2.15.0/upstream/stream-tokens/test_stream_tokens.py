# Owner(s): ["module: aotdispatch"]

import itertools
import pickle

from torch._functorch._streams.tokens import (
    blocking_copy,
    CALLER,
    caller_event,
    events_of,
    record,
    state,
    streams_of,
    synchronization,
)
from torch.testing._internal.common_utils import run_tests, TestCase


EVERY = [
    make(*numbers)
    for make, count in (
        (state, 1),
        (caller_event, 1),
        (record, 2),
        (synchronization, 1),
        (blocking_copy, 1),
    )
    for numbers in itertools.product((0, 1, 10), repeat=count)
]


class TestTokens(TestCase):
    def test_text(self):
        tokens = [state(1), caller_event(5), record(5, 0), synchronization(2)]
        found = [str(token) for token in (*tokens, blocking_copy(3))]
        self.assertEqual(found, ["s1", "e5", "e5.0", "h2", "c3"])

    def test_no_two_are_equal_or_have_one_text(self):
        """A record of an event isn't the caller's event, for any numbers."""
        self.assertEqual(len(set(EVERY)), len(EVERY))
        self.assertEqual(len({str(token) for token in EVERY}), len(EVERY))

    def test_each_is_of_one_kind(self):
        for token in EVERY:
            kinds = (
                token.stream is not None,
                token.event is not None,
                token.is_record,
                token.is_synchronization,
                token.is_blocking_copy,
            )
            self.assertEqual(sum(kinds), 1, token)

    def test_order_and_pickle_are_those_of_the_cache_key(self):
        """Whatever the order in which a set gives them, and in another process."""
        wanted = sorted(EVERY)
        self.assertEqual(sorted(set(EVERY)), wanted)
        self.assertEqual(pickle.loads(pickle.dumps(wanted)), wanted)

    def test_streams_and_events_of_a_set(self):
        tokens = {CALLER, state(3), caller_event(5), record(6, 0), synchronization(7)}
        self.assertEqual(streams_of(tokens), {0, 3})
        self.assertEqual(events_of(tokens), {5})


if __name__ == "__main__":
    run_tests()
