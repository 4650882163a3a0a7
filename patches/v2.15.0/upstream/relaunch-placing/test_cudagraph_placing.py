# Owner(s): ["module: inductor"]

import contextlib
import functools
from types import SimpleNamespace
from unittest import mock

import torch
from torch._inductor.cudagraph_relaunch.allocations import (
    ALLOCATOR,
    observed,
    Plan,
    Watch,
)
from torch._inductor.cudagraph_relaunch.operators import GROUP, Operators
from torch._inductor.cudagraph_relaunch.placing import Placing
from torch._inductor.cudagraph_relaunch.traced import Escaped, Traced
from torch.testing._internal.common_utils import run_tests, TestCase


class Recording:
    """Gives out memory of the host, and counts nodes that the test says there are.
    `made`: the allocations that operators made."""

    def __init__(self):
        self.views, self.nodes, self.made = [], 0, []
        self.selected, self.modes = [], True  # pools; are there dispatch modes?

    def place(self, view):
        self.views.append(view)
        return torch.empty_strided(view.size, view.stride, dtype=view.dtype)

    def count(self):
        return self.nodes

    def new_pool(self):
        return object()

    @contextlib.contextmanager
    def within(self, pool):
        self.selected.append(pool)
        try:
            yield
        finally:
            self.selected.remove(pool)

    def allocations_made(self):
        return len(self.made)

    def allocations(self, first):
        return self.made[first:]

    @contextlib.contextmanager
    def without_modes(self):
        self.modes = False
        yield
        self.modes = True


def empty(size, stride, dtype):
    return torch.empty_strided(size, stride, dtype=dtype)


def call_of(result, *args):
    """A call of an operator, as Watch makes it."""
    return functools.partial(lambda *call: result, torch.sin, args, {})


class TestPlacing(TestCase):
    def setUp(self):
        super().setUp()
        self.recording, self.placed, self.original = (
            Recording(),
            {},
            mock.Mock(wraps=empty),
        )

    def make(self, plan=(), with_uses=False, shapes=None):
        plan = Plan(frozenset(plan))
        return Placing(plan, self.recording, self.placed, with_uses, shapes)

    def run_in(self, placing, function):
        scope = {ALLOCATOR: self.original}
        with observed(scope, placing):
            return function(scope[ALLOCATOR])

    def test_outputs_and_scratch(self):
        placing = self.make(plan=[1])

        def region(empty):
            a = empty((2, 3), (4, 1), torch.float32)
            b = empty((4,), (1,), torch.int8)
            at = a.data_ptr()
            del a
            return at, b, empty((8,), (1,), torch.float64)

        a, b, c = self.run_in(placing, region)
        self.assertEqual(self.placed, {b.data_ptr(): 4})
        self.assertEqual(placing.scratch, {a: 28, c.data_ptr(): 64} | placing.scratch)
        self.assertEqual(len(self.recording.views), 3)
        self.original.assert_not_called()
        made = [placing.lives.made[at] for at in (b.data_ptr(), c.data_ptr())]
        self.assertEqual(made, [2, 3])
        self.assertEqual(
            placing.lives.life(a, 28).freed, 3 if a != c.data_ptr() else None
        )
        outputs = placing.plan([b.data_ptr(), c.data_ptr()], Plan())
        self.assertEqual((outputs.allocations, outputs.watch), ({1, 2}, False))

    def test_nothing_to_place(self):
        placing = self.make()
        made = self.run_in(placing, lambda empty: empty((0, 4), (4, 1), torch.float32))
        self.assertEqual((made.shape, self.recording.views), ((0, 4), []))
        self.original.assert_called_once()
        self.assertEqual(placing.count, 1)  # it is numbered

    def test_matrix_products(self):
        placing = self.make(with_uses=True)
        x, y, out = (torch.randn(2, 2) for _ in range(3))
        ran = []

        def run(number, call):
            self.recording.nodes += 2
            ran.append(number)
            return call()

        def launch(func, *args, **kwargs):
            return func(*args, **kwargs)

        with Watch(placing, run):
            launch(torch.add, x, y, out=out)
            launch(torch.mm, x, y, out=out)
            made = launch(torch.mm, x, x)
        first, second = placing.products
        x, y, out, made = (t.untyped_storage().data_ptr() for t in (x, y, out, made))
        self.assertEqual(
            (dict(first.reads), dict(first.writes)), ({x: 16, y: 16}, {out: 16})
        )
        self.assertEqual(
            (dict(second.reads), dict(second.writes)), ({x: 16}, {made: 16})
        )
        self.assertEqual((first.first, second.first), (4, 6))
        self.assertEqual(ran, [None, None, 0])
        self.assertEqual(placing.results, [(made, 16)])

    def test_products_are_noted_only_for_uses(self):
        placing = self.make()
        with Watch(placing, lambda number, call: call()):
            torch.mm(torch.randn(2, 2), torch.randn(2, 2))
        self.assertIsNone(placing.products)

    def test_sizes_that_depend_on_the_regions(self):
        shapes = mock.Mock()
        placing, n = self.make(shapes=shapes), Traced.input(0, 3)
        made = self.run_in(placing, lambda empty: empty((n, 2), (2, 1), torch.float32))
        self.assertEqual(made.shape, (3, 2))
        self.assertEqual(type(self.recording.views[0].size[0]), int)
        shapes.allocated.assert_called_once_with(made, (n, 2), (2, 1))
        with self.assertRaisesRegex(Escaped, "memory of no bytes"):
            self.run_in(placing, lambda empty: empty((n, 0), (1, 1), torch.float32))

    def pools(self, plan, requested, *segments):
        """Operators of a plan, each of which allocates these segments in its pool."""
        apart = SimpleNamespace(segments=dict(segments), requested=requested)
        apart.count, apart.once = len(segments), requested < 1000
        self.recording.apart = lambda asked: contextlib.nullcontext(apart)
        placing = self.make()
        return Operators(plan, self.recording, placing), placing

    def test_operator_that_allocates_an_output(self):
        made = torch.empty(25)
        at, plan = made.data_ptr(), Plan(operators=frozenset([3]))
        for requested, size in ((100 + 700, 100), (100 + 1200, 1536)):
            self.placed.clear()
            segments = (at, 2 << 20), (0x10, 4096)
            operators, placing = self.pools(plan, requested, *segments)
            self.assertIs(operators.run(3, call_of(made, made)), made)
            # An address that was used twice may have held what was larger.
            self.assertEqual(self.placed, {at: size})
            rest = (requested - 100 + 511) // 512 * 512
            self.assertEqual(placing.scratch, {0x10: rest})
            self.assertEqual(operators.asked, {3: (2, requested)})
            self.assertEqual(placing.lives.life(0x10, 1).freed, 2)
            self.assertEqual(placing.lives.remaining(), [at])

    def test_operators_that_allocate_alike(self):
        """The allocator is asked for the first of them alone."""
        operators, _ = self.pools(Plan(detail=True), 0)
        asked, made, memory = [], [None], torch.zeros(256)
        begin = -memory.data_ptr() // 4 % 64  # 64 numbers are 256 bytes
        x, same, less = (memory[begin + at :][:12].view(3, 4) for at in (0, 64, 136))

        @contextlib.contextmanager
        def apart(known):
            asked.append(known is None)
            yield made[0]
            made[0].count, made[0].requested = (1, 1000) if known is None else known

        self.recording.apart = apart
        for number, (sizes, *args) in enumerate(
            [
                ([4096], x, 1),
                ([4096], same, 1),
                ([4096], x, 1.0),
                ([4096], x.t(), 1),
                ([4096], less, 1),  # its alignment differs
                ([8192], x, 1),
                ([4096], [x]),
                ([4096], [x]),
                ([4096], x.to_sparse()),
                ([4096], x, [1, 2]),
                ([4096], x, [1, 2]),
            ]
        ):
            segments = {(k + 1) << 20: size for k, size in enumerate(sizes)}
            made[0] = SimpleNamespace(segments=segments, once=True)
            operators.run(number, call_of(torch.empty(0), *args))
        known = [True, False, True, True, True, False, True, True, True, True, False]
        self.assertEqual(asked, known)
        # All of a segment may be in use that is not as before.
        wanted = dict.fromkeys(range(11), (1, 1000)) | {5: (-1, 8192)}
        self.assertEqual(operators.asked, wanted)

    def test_other_operators(self):
        for plan, wanted in ((Plan(), False), (Plan(watch=True), True)):
            operators, placing = self.pools(plan, 8, (0x10, 8))
            self.assertEqual(operators.run(0, lambda: 5), 5)
            self.assertEqual((operators.are_wanted, placing.scratch), (wanted, {}))
            self.assertEqual(placing.lives.now, int(wanted))

    def test_groups_of_operators(self):
        operators, placing = self.pools(Plan(detail=True), 8)
        for number in range(GROUP + 1):
            pool = operators.group.pool
            operators.run(None, lambda: self.allocate(0x10 * (1 + number)))  # noqa: B023
            is_new = number in (0, GROUP)
            self.assertEqual(operators.group.pool is not pool, is_new)
        operators.run(None, self.allocate)
        self.assertEqual(operators.group.calls, 2)
        operators.end_group()
        for number, freed in ((0, 2), (GROUP - 1, 2), (GROUP, 3)):
            life = placing.lives.life(0x10 * (1 + number), 8)
            self.assertEqual((life.made, life.freed), (number + 1, GROUP + freed))

    def allocate(self, *addresses):
        """Run what allocates in the one pool that is selected."""
        (pool,) = self.recording.selected
        self.recording.made += [(at, 8) for at in addresses]
        return pool

    def test_pool_stays_selected_until_it_has_a_segment(self):
        """To select one takes longer than most operators do, and few allocate."""
        operators, placing = self.pools(Plan(detail=True), 8)
        with operators:
            pools = [operators.run(None, self.allocate) for _ in range(GROUP - 2)]
            self.assertEqual(self.recording.selected, pools[:1])
            pools.append(operators.run(None, lambda: self.allocate(0x10)))
            # Others would get what the operator has freed.
            self.assertEqual(self.recording.selected, [])
            pools.append(operators.run(None, self.allocate))  # it may get that
            self.assertEqual(self.recording.selected, [])
            self.assertEqual(len(set(pools)), 1)
            another = operators.run(None, self.allocate)  # of the next group
            self.assertEqual(self.recording.selected, [another])
            self.assertIsNot(another, pools[0])
        self.assertEqual(placing.lives.made, {0x10: GROUP - 1})

    def test_pool_without_a_segment_serves_any_number_of_operators(self):
        operators, _ = self.pools(Plan(detail=True), 8)
        pools = [operators.run(None, self.allocate) for _ in range(3 * GROUP)]
        self.assertEqual(self.recording.selected, pools[:1])
        self.assertEqual(len(set(pools)), 1)

    def test_no_pool_is_selected_at_the_end(self):
        for error in (False, True):
            operators, _ = self.pools(Plan(detail=True), 8)
            with contextlib.suppress(ZeroDivisionError), operators:
                operators.run(None, self.allocate)
                self.assertEqual(len(self.recording.selected), 1)
                if error:
                    raise ZeroDivisionError
            self.assertEqual(self.recording.selected, [])
        operators, _ = self.pools(Plan(detail=True), 8)
        operators.run(None, self.allocate)
        operators.end_group()
        self.assertEqual(self.recording.selected, [])

    def test_leaf_runs_without_a_mode(self):
        for plan in (Plan(), Plan(watch=True), Plan(detail=True)):
            operators, placing = self.pools(plan, 8)
            with operators:
                self.assertIs(operators.run_leaf(lambda: self.recording.modes), False)
                self.assertEqual(len(self.recording.selected), int(plan.detail))
            self.assertTrue(self.recording.modes)
            self.assertEqual(placing.lives.now, int(operators.are_wanted))

    def test_leaves_that_share_memory_with_no_result(self):
        """With detail, groups hold no results."""
        for plan in (Plan(), Plan(watch=True), Plan(detail=True)):
            operators, _ = self.pools(plan, 8)
            with operators:
                pools = [operators.run_leaf(self.allocate, apart=True) for _ in "ab"]
                self.assertIs(pools[0], pools[1])
                selected = [] if not plan.detail else pools[:1]
                self.assertEqual(self.recording.selected, selected)
            with contextlib.suppress(ZeroDivisionError), operators:
                operators.run_leaf(lambda: 1 / 0, apart=True)
            self.assertEqual(self.recording.selected, [])

    def test_time_passes_for_what_is_left_out(self):
        for plan in (Plan(), Plan(watch=True), Plan(detail=True)):
            operators, placing = self.pools(plan, 8)
            times = [operators.leave_out(), operators.leave_out()]
            self.assertEqual(times, [1, 2] if operators.are_wanted else [0, 0])
            operators.run(None, lambda: None)
            self.assertEqual(placing.lives.now, 3 * int(operators.are_wanted))


if __name__ == "__main__":
    run_tests()
