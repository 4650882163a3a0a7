# Owner(s): ["module: inductor"]

from unittest import mock

import torch
from torch._functorch._activation_offloading import device_rates, log
from torch._functorch._activation_offloading.cost_model import Link
from torch._functorch._activation_offloading.ops import (
    BUDGET,
    IN_USE,
    LOAD,
    SLAB,
    STORE,
    VALUE,
)
from torch._inductor import config
from torch._inductor.streams.schedule_notes import notes_of
from torch.testing._internal.common_utils import run_tests, TestCase
from torch.testing._internal.inductor_schedules import Program


aten = torch.ops.aten
SCHEDULE = "torch._inductor.activation_offloading.schedule"
UNIT = 1 << 22  # bytes of each tensor of 1024 x 1024
SIZE = [1024, 1024]
RATES = device_rates.Rates(Link(UNIT / 100, UNIT / 100, 0.0), 1e6, 1e6, True)


@config.patch({"triton.streams": True})
class OffloadScheduleTestCase(TestCase):
    us = 100.0  # of a matrix product; a copy takes 100

    def setUp(self):
        super().setUp()
        self.program = Program()
        self.call = self.program.call
        self.x = self.program.input(*SIZE)
        for patch in (
            mock.patch.object(device_rates, "rates", lambda index: RATES),
            mock.patch(f"{SCHEDULE}.known_us", lambda *args: self.us),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def product(self, *operands):
        return self.call(aten.mm.default, *(operands or (self.x, self.x)))

    def store(self, slab, value, budget=100):
        custom = {BUDGET: int(budget * UNIT)}
        return self.call(STORE, slab, value, 0, custom=custom)

    def load(self, slab, budget=100):
        custom = {BUDGET: int(budget * UNIT), VALUE: "mm"}
        device = torch.device("cuda:0")
        args = 0, SIZE, [1024, 1], torch.float32, device
        return self.call(LOAD, slab, *args, custom=custom)

    def scheduled(self, *results, **options):
        """The nodes of the graph in the order of the schedule, and which stores each
        waits for."""
        self.program.output(*results)
        place = {node: i for i, node in enumerate(self.program.graph.nodes)}

        def origin(node):
            return max(
                (n for n in node.node.get_origins() if n in place), key=place.get
            )

        with self.program.scheduled(**options) as scheduler:
            made = {node.get_name(): origin(node) for node in scheduler.nodes}
            notes = notes_of(scheduler)
            self.slabs = notes.slabs
            self.waits = {
                origin(node): [made[name] for name in names]
                for node, names in notes.awaited_stores.items()
            }
            self.ask(scheduler)
            return list(made.values())

    def ask(self, scheduler):
        """What a test asks of the schedule."""


class TestStores(OffloadScheduleTestCase):
    def forward(self, budget=100):
        """Five products in a row. The first two are stored, at the end of the graph."""
        self.products = [self.product()]
        for _ in range(4):
            self.products.append(self.product(self.products[-1], self.x))
        self.slab = self.call(SLAB, 2 * UNIT, 0, True)
        self.stores = [self.store(self.slab, p, budget) for p in self.products[:2]]
        return self.scheduled(self.slab, self.products[-1])

    def test_places(self):
        found = self.forward()
        a, b, *others = self.products
        wanted = [self.slab, a, self.stores[0], b, self.stores[1], *others]
        self.assertEqual(found, wanted)

    @config.patch({"triton.streams": False})
    def test_without_the_option(self):
        found = self.forward()
        self.assertEqual(found[-2:], self.stores)
        self.assertEqual(self.waits, {})

    def test_step_that_waits_when_the_copy_has_ended(self):
        """With a margin of a half, at 250 and at 400; the products take 500."""
        self.forward()
        self.assertEqual(
            self.waits,
            {self.products[3]: [self.stores[0]], self.products[4]: [self.stores[1]]},
        )

    def test_step_that_waits_because_the_budget_needs_it(self):
        """After the tensor's last reader."""
        self.forward(budget=2)
        self.assertEqual(
            self.waits,
            {self.products[2]: [self.stores[0]], self.products[3]: [self.stores[1]]},
        )

    def test_what_is_published(self):
        seen = []
        self.addCleanup(log.subscribe(seen.append))
        self.forward()
        rows = (("mm_default", 1, 3), ("mm_default_1", 2, 4))
        self.assertEqual(seen, [log.Copies(False, 5, rows)])
        self.assertEqual(seen[0].text("mm_default_1"), "2 / 4 of 5")

    def test_store_of_an_input(self):
        slab = self.call(SLAB, UNIT, 0, True)
        a = self.product()
        store = self.store(slab, self.x)
        self.assertEqual(self.scheduled(slab, a), [slab, store, a])

    def test_graph_without_copies(self):
        a = self.product()
        seen = []
        self.addCleanup(log.subscribe(seen.append))
        self.assertEqual(self.scheduled(a), [a])
        self.assertEqual((seen, self.waits), ([], {}))


class TestLoads(OffloadScheduleTestCase):
    us = 1000.0

    def backward(self, wide=False, budget=0):
        """Four products in a row. The last reads what is loaded."""
        slab = self.program.input(UNIT, device="cpu", dtype=torch.uint8)
        self.use = self.call(IN_USE, slab)
        self.loaded = self.load(slab, budget)
        a = self.product()
        b = self.product(a, self.x)
        self.products = [a, b]
        if wide:  # b and two more are in memory with it
            other = self.product(b, self.x)
            c = self.product(other, b)
            self.products += [other, c]
        else:
            c = self.product(b, self.x)
            self.products.append(c)
        self.products.append(self.product(c, self.loaded))
        return self.scheduled(self.products[-1], is_backward=True, is_inference=False)

    def test_as_late_as_it_ends_well_before_its_reader(self):
        found = self.backward(budget=100)
        a, b, c, d = self.products
        self.assertEqual(found, [self.use, a, b, self.loaded, c, d])
        self.assertEqual(self.slabs, {"x1"})

    def test_without_room(self):
        found = self.backward(wide=True)
        a, b, other, c, d = self.products
        self.assertEqual(found, [self.use, a, b, other, c, self.loaded, d])

    @config.patch({"triton.streams": False})
    def test_without_the_option(self):
        found = self.backward(budget=100)
        self.assertEqual(found[:2], [self.use, self.loaded])
        self.assertEqual(self.slabs, ())


class TestMemory(OffloadScheduleTestCase):
    at_once = False

    def ask(self, scheduler):
        from torch._inductor.activation_offloading.schedule import Schedule

        live = Schedule(scheduler, self.at_once).live(set())
        self.live = [nbytes / UNIT for nbytes in live]

    def test_of_a_forward(self):
        """A launch of a CUDA graph holds results from its beginning."""
        for self.at_once, wanted in ((False, [1, 2, 2]), (True, [2, 3, 2])):
            self.setUp()
            a = self.product()
            b = self.product(a, a)
            self.scheduled(self.product(b, b))
            self.assertEqual(self.live, wanted)

    def test_of_a_backward(self):
        """With what the forward has saved, until its last reader."""
        saved = self.program.input(*SIZE)
        self.program.graph.find_nodes(op="placeholder")[0].target = "tangents_1"
        a = self.product(self.x, saved)
        self.scheduled(self.product(a, self.x), is_backward=True, is_inference=False)
        self.assertEqual(self.live, [2, 2])


if __name__ == "__main__":
    run_tests()
