"""Saved activations on the host: the plan, the placement of copies, the slabs, the generated code, and the values.

The values are compared without a GPU, too: a graph pair is rewritten for the CPU and run by an interpreter, so that
every store and load moves real bytes. `TestRaces` runs generated forwards and backwards on a machine model. `TestGpu`
compares training with and without offload on a device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import torch
import torch._dynamo.variables.streams
import torch.nn.functional as F
from torch import nn
from torch._inductor.test_case import TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.utils.checkpoint import checkpoint, CheckpointPolicy, create_selective_checkpoint_contexts

import form
from torch_overlay import config
from torch_overlay._functorch.offload import (
    candidates,
    decision,
    device_rates,
    kernel_times,
    log,
    pinned_memory,
    profile_cache,
    runtime as offload_runtime,
    settings as offload_config,
)
from torch_overlay._functorch.offload.copy_placement import just_in_time, Load, place_loads, place_waits, Store
from torch_overlay._functorch.offload.cost_model import Candidate, Link, Model, Recompute, Step
from torch_overlay._functorch.offload.plan import _fits, _set, _spread, choose
from torch_overlay._functorch.streams.ids import copy_out_stream
from torch_overlay._functorch.streams.tokens import CALLER
from torch_overlay._inductor.offload.schedule import Schedule
from torch_overlay._inductor.relaunch import causes, runner
from torch_overlay._inductor.relaunch.capture.streams import orders_others
from torch_overlay._inductor.relaunch.launch import executable
from torch_overlay._inductor.relaunch.proof.nodes import CopyNode, CopySide
from torch_overlay._inductor.streams.plan import Buffer, Op
from torch_overlay._inductor.streams.planner import plan_streams
from torch_overlay._inductor.streams.region_spec import of_device, OperationKind, RegionSpec
from torch_overlay._options import offload_settings
from torch_overlay.analysis import check_step
from torch_overlay.testing import compile_only, simulated_gpu


FAST = Link(out=1e6, back=1e6, latency_us=0.0)  # bytes per us: a copy of 1 MB takes 1 us
MB = 10**6


# ---- the plan


def layers(
    rows: Sequence[tuple[float, int, int]], again: Mapping[int, tuple[float, int]] = {}, at_once: bool = False
) -> Model:
    """A chain of layers with (us, MB that it saves, MB of its gradient). `again`: time and source of recomputations."""
    saved = {f"a{i}": size * MB for i, (_, size, _) in enumerate(rows)}
    forward = [
        Step(f"f{i}", us, {f"a{i}": saved[f"a{i}"]}, frozenset({f"a{i - 1}"} if i else ()))
        for i, (us, _, _) in enumerate(rows)
    ]
    backward = [
        Step(f"b{i}", us, {f"g{i}": size * MB}, frozenset({f"a{i}", f"g{i + 1}"}))
        for i, (us, _, size) in reversed([*enumerate(rows)])
    ]
    recomputed = {f"a{i}": Recompute(us, frozenset({f"a{source}"})) for i, (us, source) in again.items()}
    candidates = [Candidate(name, size, again=recomputed.get(name)) for name, size in saved.items()]
    return Model(forward, backward, saved, ["g0"], candidates, at_once)


def chain(count: int, again: Mapping[int, tuple[float, int]] = {}, at_once: bool = False) -> Model:
    """Layer i saves what it makes; the backward reads that in the reverse order."""
    return layers([(10.0, 1, 1)] * count, again, at_once)


def slow_back(us: float) -> Link:
    """A copy of 1 MB takes 1 us to the host, and more back."""
    return Link(out=1e6, back=MB / us, latency_us=0.0)


def costs_of_all_sets(model: Model, budget: int, link: Link) -> Iterator[tuple[int, float]]:
    """Missing bytes and microseconds of each set of values to copy and to compute again."""
    able = [c for c in model.candidates if c.again is not None]
    for again in subsets(able):
        if all(_fits(c, [other for other in again if other is not c]) for c in again):
            for chosen in subsets([c.name for c in model.candidates if c not in again]):
                for rate in (link, None) if chosen else ():
                    yield _set(model, [*chosen], budget, link, rate, [*again]).cost()[:2]


def subsets(values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(values, n) for n in range(len(values) + 1))


class TestPlan(TestCase):
    def test_peak_of_a_chain_is_all_that_it_saves_and_a_gradient(self) -> None:
        self.assertEqual(chain(8).peak(()), 9 * MB)

    def test_launched_graph_holds_what_goes_in_and_comes_out_from_its_begin_to_its_end(self) -> None:
        """A backward of stages, here of two steps each, holds it for as long as a stage takes."""
        model, graphed = chain(8), chain(8, at_once=True)
        self.assertEqual([n // MB for n in graphed._forward_live({}, ())], [8] * 8)
        self.assertEqual([n // MB for n in model._forward_live({}, ())], [1, 2, 3, 4, 5, 6, 7, 8])
        self.assertEqual([n // MB for n in graphed._backward_live({}, ())], [9, 10, 8, 8, 6, 6, 5, 4])
        self.assertEqual([n // MB for n in model._backward_live({}, ())], [9, 9, 8, 7, 6, 5, 4, 3])
        self.assertEqual((graphed.peak(["a0"]), model.peak(["a0"])), (9 * MB, 8 * MB))
        self.assertEqual(choose(graphed, 8 * MB, FAST).peak, 8 * MB)

    def test_steps_that_wait_for_copies_so_that_the_peak_fits_are_counted(self) -> None:
        """Layers take 10 us and copies 15; a launch has the memory of all that stays from its begin on, so copies of
        layers in a row can't fall after. Those of every second one or so needn't."""
        graphed = chain(20, at_once=True)
        link = Link(out=MB / 15, back=MB / 15, latency_us=0.0)
        in_a_row = [f"a{i}" for i in range(8)]
        self.assertEqual(graphed.peak(in_a_row), 14 * MB)
        self.assertEqual(graphed.exposed(in_a_row, link), 0.0)
        self.assertGreater(graphed.exposed(in_a_row, link, (), 14 * MB), 20.0)
        found = choose(graphed, 14 * MB, link)
        self.assertEqual((found.peak, found.exposed_us, len(found.chosen)), (14 * MB, 0.0, 8))

    def test_recomputation_takes_the_place_of_most_copies_where_the_link_is_far_too_slow(self) -> None:
        """Each second value can be made of the one before it, for next to nothing."""
        again = {i: (0.5, i - 1) for i in range(1, 20, 2)}
        link = Link(out=MB / 60, back=MB / 60, latency_us=0.0)
        for at_once in (False, True):
            without = choose(chain(20, at_once=at_once), 12 * MB, link)
            found = choose(chain(20, again, at_once), 12 * MB, link)
            self.assertLessEqual(found.peak, 12 * MB)
            self.assertGreater(len(found.recomputed), len(found.chosen))
            self.assertLess(found.exposed_us + found.recompute_us, without.exposed_us / 2)
            self.assertTrue({f"a{again[int(name[1:])][1]}" for name in found.recomputed}.isdisjoint(found.recomputed))

    def test_spread_sets_are_spread_however_many_are_taken(self) -> None:
        model = chain(64)
        for part in (1.0, 0.5):
            names = _spread(model, model.candidates, part)
            self.assertEqual(sorted(names), sorted(model.saved))
            early = int(64 * part)
            for count in (4, 8, 16):
                taken = sorted(model.made[n] for n in names[:count])
                gaps = [b - a for a, b in zip(taken, taken[1:])]
                self.assertLessEqual(max(gaps), early // count)
                self.assertLess(taken[-1], early)

    def test_nothing_is_chosen_where_the_peak_fits(self) -> None:
        found = choose(chain(8), 9 * MB, FAST)
        self.assertEqual((found.chosen, found.peak, found.exposed_us), ((), 9 * MB, 0.0))

    def test_what_is_made_first_and_read_last_goes_first(self) -> None:
        found = choose(chain(8), 6 * MB, FAST)
        self.assertEqual(found.chosen, ("a0", "a1", "a2"))
        self.assertEqual(found.peak, 6 * MB)
        self.assertEqual(found.exposed_us, 0.0)

    def test_no_more_is_chosen_than_the_budget_needs(self) -> None:
        for budget in range(4, 10):
            found = choose(chain(8), budget * MB, FAST)
            self.assertEqual(len(found.chosen), 9 - budget, budget)

    def test_what_frees_nothing_at_the_peak_stays(self) -> None:
        model = chain(4)
        # Two large temporaries make the peak in the last step of the backward, where only a0 is still needed.
        steps = [*model.backward[:-1], dataclasses.replace(model.backward[-1], makes={"g0": MB, "t": 9 * MB})]
        model = Model(model.forward, steps, model.saved, ["g0"], model.candidates)
        self.assertEqual(choose(model, 5 * MB, FAST).chosen, ())
        self.assertEqual(choose(model, 5 * MB, FAST).peak, model.peak(()))

    def test_slow_link_exposes_time_and_the_plan_says_how_much(self) -> None:
        slow = Link(out=MB / 100, back=MB / 100, latency_us=0.0)  # 100 us for what a step of 10 us makes
        found = choose(chain(8), 6 * MB, slow)
        self.assertLessEqual(found.peak, 6 * MB)
        # Three copies take 300 us; the forward has 70 us left behind the first producer.
        self.assertGreater(found.exposed_us, 200)
        self.assertLess(found.hidden, 0.7)

    def test_each_copy_says_when_it_runs_and_how_much_of_it_shows(self) -> None:
        """Layers take 10 us and copies 25: the third one ends 5 us after the forward, and is waited for in between."""
        model, slow = chain(8), Link(out=MB / 25, back=MB / 25, latency_us=0.0)
        found = {t.name: t for t in model.transfers(["a0", "a1", "a2"], slow)}
        self.assertEqual([found[n].out for n in ("a0", "a1", "a2")], [(10.0, 35.0), (35.0, 60.0), (60.0, 85.0)])
        # They come back in the order of their readers, which begin after 50, 60 and 70 us.
        self.assertEqual([found[n].back for n in ("a2", "a1", "a0")], [(0.0, 25.0), (25.0, 50.0), (50.0, 75.0)])
        self.assertEqual([found[n].exposed_us for n in ("a0", "a1", "a2")], [5.0, 0.0, 5.0])
        self.assertEqual(found["a0"].hidden, 0.9)
        self.assertEqual(model.exposed(["a0", "a1", "a2"], slow), 10.0)
        # With a budget they come back when there is room, and steps wait longer.
        found = choose(model, 6 * MB, slow)
        self.assertEqual(found.transfers, tuple(model.transfers(["a0", "a1", "a2"], slow, (), 6 * MB)))
        self.assertEqual([t.back for t in found.transfers], [(20.0, 45.0), (45.0, 70.0), (70.0, 95.0)])
        self.assertEqual(found.exposed_us, 30.0)

    def test_what_is_cheap_to_compute_again_is_not_copied_where_the_copy_would_show(self) -> None:
        slow = Link(out=MB / 100, back=MB / 100, latency_us=0.0)
        model = chain(8, {1: (1.0, 0)})
        found = choose(model, 6 * MB, slow)
        self.assertEqual(found.recomputed, ("a1",))
        self.assertNotIn("a1", found.chosen)
        self.assertLessEqual(found.peak, 6 * MB)
        self.assertEqual(found.recompute_us, 1.0)
        self.assertEqual(choose(model, 6 * MB, FAST).recomputed, ())

    def test_copy_that_would_take_longer_than_its_slack_comes_later(self) -> None:
        """The larger value has more slack, but not enough for its copy back, whose direction is the slower one."""
        model = layers([(5, 4, 0), (5, 2, 0), (50, 1, 1)], at_once=True)
        self.assertEqual(choose(model, 7 * MB, slow_back(30)).chosen, ("a1",))

    def test_something_is_copied_even_if_recomputation_alone_would_do(self) -> None:
        """Without a copy there is no offload."""
        model = layers([(10, 1, 0), (10, 1, 0), (10, 1, 1)], {1: (1.0, 0)})
        self.assertTrue(choose(model, 3 * MB, slow_back(30)).chosen)
        model = layers([(5, 4, 0), (5, 2, 0), (50, 1, 1)], {1: (5.0, 0), 2: (1.0, 1)}, at_once=True)
        self.assertTrue(choose(model, 7 * MB, slow_back(30)).chosen)

    def test_what_the_user_asked_for_is_copied_where_a_recomputation_would_do_instead(self) -> None:
        model = layers([(5, 1, 0), (5, 4, 1), (5, 2, 1), (10, 4, 0)], {1: (0.5, 0), 2: (0.5, 1), 3: (0.5, 0)})
        model.candidates = [dataclasses.replace(c, must=c.name in ("a0", "a1")) for c in model.candidates]
        self.assertEqual(choose(model, 10 * MB, slow_back(100)).chosen, ("a0", "a1"))

    def test_what_a_recomputation_reads_stays(self) -> None:
        again = {1: (5.0, 0), 2: (1.0, 1), 3: (5.0, 0)}
        found = choose(layers([(10, 1, 1), (10, 1, 1), (10, 1, 0), (5, 1, 0)], again), 0, slow_back(100))
        self.assertEqual(found.recomputed, ("a2",))

    def test_least_peak_is_what_can_be_had(self) -> None:
        found = choose(chain(8), 0, FAST)
        self.assertGreater(found.peak, 0)
        self.assertEqual(found.least, chain(8).peak([f"a{i}" for i in range(8)]))

    def test_what_the_user_asked_for_is_chosen_in_any_case(self) -> None:
        model = chain(8)
        model.candidates = [dataclasses.replace(c, must=c.name == "a5") for c in model.candidates]
        self.assertEqual(choose(model, 100 * MB, FAST).chosen, ("a5",))

    def test_drawn_plans_cost_little_more_than_the_best_of_all_sets(self) -> None:
        cost = least = 0.0
        for seed in range(150):
            rng = random.Random(seed)
            rows = [(rng.choice((2, 5, 10, 30)), rng.choice((1, 2, 4)), rng.choice((0, 1))) for _ in range(5)]
            again = {i: (rng.choice((0.5, 3.0, 10.0)), rng.randrange(i)) for i in range(1, 5) if rng.random() < 0.5}
            model = layers(rows, again, rng.random() < 0.5)
            budget, link = int(model.peak(()) * rng.choice((0.6, 0.75, 0.9))), slow_back(rng.choice((1, 5, 20)))
            found = choose(model, budget, link)
            missing, best = min(costs_of_all_sets(model, budget, link))
            self.assertEqual((bool(found.chosen), max(0, found.peak - budget)), (True, missing))
            cost, least = cost + found.exposed_us + found.recompute_us, least + best
        self.assertLess(cost, 1.05 * least)

    def test_small_tensors_of_one_layer_are_given_back_if_a_large_one_suffices(self) -> None:
        sizes = {"big": 4 * MB, "small": MB // 100}
        forward = [Step("f0", 10, {"small": sizes["small"]}), Step("f1", 10, {"big": sizes["big"]}), Step("f2", 50, {})]
        backward = [
            Step("b0", 50, {"t": MB}),
            Step("b1", 10, {}, frozenset({"big"})),
            Step("b2", 10, {}, frozenset({"small"})),
        ]
        model = Model(forward, backward, sizes, (), [Candidate(n, s) for n, s in sizes.items()])
        self.assertEqual(choose(model, 5 * MB, FAST).chosen, ("small",))
        self.assertEqual(choose(model, 9 * MB // 2, FAST).chosen, ("big",))


class TestPlacement(TestCase):
    def test_load_is_launched_as_early_as_the_budget_allows(self) -> None:
        self.assertEqual(place_loads([8, 6, 4, 4, 4], [Load(4, 2)], 6), [2])
        self.assertEqual(place_loads([4, 4, 4, 4, 4], [Load(4, 2)], 6), [0])

    def test_load_is_launched_no_earlier_than_it_takes_to_end_well_before_its_reader(self) -> None:
        """Steps of 10 us, copies of 5 that are counted four times, and half as long again after one another."""
        starts = [10.0 * i for i in range(10)]
        self.assertEqual(just_in_time(starts, [9, 6, 8], [5.0, 5.0, 5.0]), [7, 4, 6])
        self.assertEqual(just_in_time(starts, [9, 9, 9, 9, 9], [5.0] * 5), [7, 7, 6, 6, 5])
        self.assertEqual(just_in_time(starts, [0, 1], [5.0, 5.0]), [0, 0])
        self.assertEqual(just_in_time([], [0], [5.0]), [0])
        loads = [Load(6, 5), Load(8, 5)]
        self.assertEqual(place_loads([0] * 10, loads, 100, [3, 5]), [3, 5])
        self.assertEqual(place_loads([0] * 10, loads, 5, [3, 5]), [3, 6])

    def test_load_without_room_is_launched_before_its_reader(self) -> None:
        self.assertEqual(place_loads([9, 9, 9], [Load(2, 1)], 6), [2])

    def test_bytes_in_flight_are_bounded(self) -> None:
        live = [2] * 10
        loads = [Load(i, 2) for i in range(3, 9)]
        places = place_loads(live, loads, 6)
        for step in range(10):
            in_flight = sum(load.nbytes for load, p in zip(loads, places) if p <= step < load.first)
            self.assertLessEqual(live[step] + in_flight, 6)

    def test_loads_are_launched_in_the_order_of_their_readers(self) -> None:
        places = place_loads([0] * 10, [Load(8, 1), Load(3, 1), Load(5, 4)], 4)
        self.assertEqual(sorted(places), [places[1], places[2], places[0]])

    def test_copy_that_has_ended_is_waited_for_at_once(self) -> None:
        self.assertEqual(place_waits([1, 1, 1, 1], [Store(0, 1, 1, ends=2)], 100), [2])

    def test_reader_is_behind_no_wait(self) -> None:
        self.assertEqual(place_waits([1, 1, 1, 1], [Store(0, 2, 1, ends=1)], 100), [3])

    def test_budget_makes_a_step_wait_for_the_oldest_copy(self) -> None:
        live = [1, 2, 3, 4, 5]
        stores = [Store(i, i, 1, ends=5) for i in range(5)]
        self.assertEqual(place_waits(live, stores, 3), [3, 4, 5, 5, 5])

    def test_planner_orders_an_operation_behind_a_copy_and_frees_there(self) -> None:
        ops = [
            Op("make", 0, writes=frozenset({"x"})),
            Op("copy", 9, reads=frozenset({"x"}), writes=frozenset({"slab"}), promised_to=frozenset({CALLER})),
            Op("next", 0, writes=frozenset({"y"})),
            Op("last", 0, writes=frozenset({"z"}), order_after=frozenset({"copy"})),
        ]
        plan = plan_streams(ops, [Buffer("x", 0), Buffer("y", 0), Buffer("z", 0)])
        self.assertEqual(plan.release["x"], 3)
        self.assertEqual([(e.after, e.waits) for e in plan.events], [(0, ((1, 9),)), (1, ((3, 0),))])
        free = plan_streams([dataclasses.replace(op, order_after=frozenset()) for op in ops], [Buffer("x", 0)])
        self.assertEqual(free.release["x"], 4)  # the exit


class TestConfig(TestCase):
    def test_what_is_understood(self) -> None:
        def parse(value: Any) -> Any:
            return offload_config.parse(value, "activation_offload")

        self.assertIsNone(parse(None))
        self.assertEqual(parse("auto"), offload_config.Settings(None, strict=False))
        self.assertEqual(parse({"budget_gb": 1.5}), offload_config.Settings(1_500_000_000))
        self.assertEqual(parse("2"), offload_config.Settings(2_000_000_000))
        self.assertEqual(
            parse({"budget_gb": 1, "strict": False, "min_bytes": 0}), offload_config.Settings(10**9, False, 0)
        )

    def test_anything_else_is_one_clear_error(self) -> None:
        for value in ({}, {"budget": 1}, {"budget_gb": -1}, {"budget_gb": float("nan")}, {"budget_gb": "1"}, 3, "much"):
            with self.assertRaisesRegex(ValueError, r"activation_offload is .*; it must be None, \"auto\", or a dict"):
                offload_config.parse(value, "activation_offload")

    def test_streams_are_needed(self) -> None:
        with config.patch(activation_offload="auto", streams=False):
            self.assertRaisesRegex(ValueError, r"needs \S+\.config\.streams", offload_settings, config)

    def test_option_is_part_of_the_compile_cache_keys(self) -> None:
        from torch_overlay._inductor.cache_key import config_digest

        digests = set()
        for value in (None, "auto", {"budget_gb": 1}, {"budget_gb": 2}, {"budget_gb": 2, "strict": False}):
            with config.patch(activation_offload=value):
                digests.add(config_digest())
        self.assertEqual(len(digests), 5)


# ---- slabs


@contextlib.contextmanager
def host_slabs(stream: Callable[[], Any] = lambda: "current") -> Iterator[None]:
    """Slabs without a device: nothing is pinned. They are given up at the end."""
    with (
        mock.patch.object(pinned_memory, "pin", lambda *args: 0),
        mock.patch.object(offload_runtime, "_current_stream", lambda device: stream()),
        mock.patch.object(offload_runtime, "_is_capturing", lambda: False),
        mock.patch.multiple(offload_runtime, _free=[], _all={}, _kept=[]),
    ):
        yield


class FakeStream:
    def __init__(self) -> None:
        self.waited: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waited.append(other)


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(offload_runtime.take_slab(4096, 0))
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (slab,) = ctx.saved_tensors
        offload_runtime.note_use(slab)
        return grad * 2


@instantiate_parametrized_tests
class TestSlabs(TestCase):
    def test_slab_returns_when_the_backward_has_consumed_it(self) -> None:
        x = torch.ones(3, requires_grad=True)
        with host_slabs():
            for _ in range(3):
                y = _Keep.apply(x).sum()
                self.assertEqual(offload_runtime.live()["in_use"], 1)
                y.backward()
                self.assertEqual(offload_runtime.live(), {"slabs": 1, "in_use": 0, "bytes": 4096})

    def test_forward_whose_backward_never_runs_frees_its_slab(self) -> None:
        x = torch.ones(3, requires_grad=True)
        with host_slabs():
            y = _Keep.apply(x)
            del y
            gc.collect()
            self.assertEqual(offload_runtime.live()["in_use"], 0)

    def test_forwards_that_are_alive_at_once_have_slabs_of_their_own(self) -> None:
        with host_slabs():
            slabs = [offload_runtime.take_slab(1024, 0) for _ in range(3)]
            self.assertEqual(len({s.data_ptr() for s in slabs}), 3)
            del slabs[1]
            self.assertEqual(offload_runtime.live(), {"slabs": 3, "in_use": 2, "bytes": 3 * 1024})

    def test_view_of_a_slab_keeps_it(self) -> None:
        with host_slabs():
            part = offload_runtime.take_slab(1024, 0)[512:].view(torch.float32)
            self.assertEqual(offload_runtime.live()["in_use"], 1)
            del part
            self.assertEqual(offload_runtime.live()["in_use"], 0)

    def test_slab_serves_a_little_less_but_not_much_less(self) -> None:
        with host_slabs():
            address = offload_runtime.take_slab(1200, 0).data_ptr()
            self.assertEqual(offload_runtime.take_slab(1000, 0).data_ptr(), address)
            self.assertNotEqual(offload_runtime.take_slab(100, 0).data_ptr(), address)

    def test_same_stream_waits_for_nothing_another_one_for_the_last_reader(self) -> None:
        a, b = FakeStream(), FakeStream()
        now = [a]
        with host_slabs(lambda: now[0]):
            slab = offload_runtime.take_slab(64, 0)
            offload_runtime.note_use(slab)
            del slab
            slab = offload_runtime.take_slab(64, 0)
            self.assertEqual(a.waited, [])
            del slab
            now[0] = b
            slab = offload_runtime.take_slab(64, 0)
            self.assertEqual(b.waited, [a])
            now[0] = a
            offload_runtime.note_use(slab)  # a backward on another stream than its forward
            self.assertEqual(a.waited, [b])

    def test_slab_returns_if_its_last_stream_cannot_be_waited_for(self) -> None:
        a, b = FakeStream(), FakeStream()
        now = [a]
        with host_slabs(lambda: now[0]):
            offload_runtime.take_slab(64, 0)
            now[0] = b
            fails = mock.patch.object(b, "wait_stream", side_effect=RuntimeError("no"))
            with fails, self.assertRaisesRegex(RuntimeError, "no"):
                offload_runtime.take_slab(64, 0)
            self.assertEqual(offload_runtime.live()["in_use"], 0)
            slab = offload_runtime.take_slab(64, 0)
            self.assertEqual((b.waited, offload_runtime.live()["slabs"]), ([a], 1))
            del slab

    def test_slab_that_is_freed_while_free_ones_are_released_is_not_lost(self) -> None:
        """The garbage collector may run there."""
        with (
            host_slabs(),
            mock.patch.object(torch.cuda, "synchronize", lambda: None),
            mock.patch.object(pinned_memory, "unpin", lambda address: None),
        ):
            held = [offload_runtime.take_slab(64, 0)]
            offload_runtime.take_slab(1024, 0)

            class Collected(list):
                def clear(self) -> None:
                    held.clear()
                    super().clear()

            with mock.patch.object(offload_runtime, "_free", Collected(offload_runtime._free)):
                offload_runtime.release_free()
                held.clear()
                self.assertEqual(offload_runtime.live()["in_use"], 0)

    def test_slab_that_a_capture_took_never_returns(self) -> None:
        with host_slabs():
            with mock.patch.object(offload_runtime, "_is_capturing", lambda: True):
                address = offload_runtime.take_slab(64, 0).data_ptr()
            self.assertNotEqual(offload_runtime.take_slab(64, 0).data_ptr(), address)

    def test_capture_does_not_wait_for_what_used_the_slab_in_a_warm_up(self) -> None:
        """That work is no part of the capture: the wait would be an error that ends it."""
        warm_up, captured = FakeStream(), FakeStream()
        now = [warm_up]
        with host_slabs(lambda: now[0]):
            address = offload_runtime.take_slab(64, 0).data_ptr()
            now[0] = captured
            with mock.patch.object(offload_runtime, "_is_capturing", lambda: True):
                slab = offload_runtime.take_slab(64, 0)
                offload_runtime.note_use(slab)
            self.assertEqual((slab.data_ptr(), captured.waited), (address, []))

    def test_threads_take_different_slabs(self) -> None:
        with host_slabs():
            with ThreadPoolExecutor(8) as pool:
                found = [*pool.map(lambda _: offload_runtime.take_slab(64, 0), range(8))]
            self.assertEqual(len({s.data_ptr() for s in found}), 8)

    def test_pages_of_a_large_slab_are_made_by_several_threads(self) -> None:
        def resident() -> int:
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

        with mock.patch.object(pinned_memory, "PART", 4 << 20):
            before = resident()
            slab = offload_runtime._Slab((64 << 20) + 5)
            grown = resident() - before
            self.assertEqual(bytes(slab.memory[-3:]), bytes(3))
        self.assertGreater(grown, 48 << 20)

    def test_memory_that_can_not_be_pinned(self) -> None:
        with host_slabs(), mock.patch.object(pinned_memory, "pin", lambda *args: 2):
            with self.assertRaisesRegex(offload_runtime.OffloadError, r"could not be pinned \(CUDA error 2\)"):
                offload_runtime.take_slab(64, 0)
            with self.assertLogs(offload_runtime.__name__, "WARNING"):
                slab = offload_runtime.take_slab(64, 0, strict=False)
            self.assertFalse(offload_runtime.holds(slab.data_ptr()))

    def test_error_of_pinning_is_not_left_to_the_next_launch(self) -> None:
        errors = []

        def register(address: int, nbytes: int, flags: int) -> int:
            errors.extend([2] * (nbytes > 64))
            return 2 if errors else 0

        runtime = mock.Mock(cudaHostRegister=register, cudaGetLastError=errors.pop)
        with (
            mock.patch.object(torch.cuda, "cudart", lambda: runtime),
            mock.patch.object(pinned_memory.ctypes, "CDLL", lambda name: runtime),
        ):
            self.assertEqual((pinned_memory.pin(0x1000, 64), pinned_memory.pin(0x1000, 4096)), (0, 2))
        self.assertEqual(errors, [])

    def test_memory_that_is_not_pinned_is_not_unpinned(self) -> None:
        """CUDA would report the failure at the next launch of a kernel."""
        unpinned: list[int] = []
        with (
            host_slabs(),
            mock.patch.object(pinned_memory, "pin", lambda address, nbytes: nbytes > 64),
            mock.patch.object(pinned_memory, "unpin", unpinned.append),
            mock.patch.object(torch.cuda, "synchronize", lambda: None),
        ):
            pinned = offload_runtime.take_slab(64, 0).data_ptr()
            with self.assertLogs(offload_runtime.__name__, "WARNING"):
                offload_runtime.take_slab(1024, 0, strict=False)
            offload_runtime.release_free()
        self.assertEqual(unpinned, [pinned])

    def test_host_without_room_says_what_would_fit(self) -> None:
        with (
            host_slabs(),
            mock.patch.object(pinned_memory, "available_bytes", lambda: 10**9),
            self.assertRaisesRegex(offload_runtime.OffloadError, r"keeps 2.00 GB .* 900.00 MB would fit"),
        ):
            offload_runtime.check_host_memory(2 * 10**9)

    def test_hooks_that_look_at_saved_tensors_are_refused_and_those_of_checkpointing_are_not(self) -> None:
        with host_slabs():
            with (
                torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
                self.assertRaisesRegex(offload_runtime.OffloadError, "saved-tensor hooks are active"),
            ):
                offload_runtime.take_slab(64, 0)
            x = torch.ones(3, requires_grad=True)
            checkpoint(_Keep.apply, x, use_reentrant=False).sum().backward()
            self.assertEqual(x.grad, 2 * torch.ones(3))
            self.assertEqual(offload_runtime.live()["in_use"], 0)

    @parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
    def test_copies_keep_the_layout(self, dtype: torch.dtype) -> None:
        with host_slabs():
            slab = offload_runtime.take_slab(4096, 0)
            for make in (lambda t: t, lambda t: t.transpose(0, 2), lambda t: t[1]):
                source = make(torch.randn(3, 4, 5).mul(3).to(dtype))
                offload_runtime.copy_out(slab, source, 1024)
                target = torch.empty_strided(source.shape, source.stride(), dtype=dtype)
                offload_runtime.copy_in(target, slab, 1024)
                self.assertEqual(target, source)


# ---- programs


class Chain(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.sum()


class Attention(nn.Module):
    """Saves views of one matmul, outputs of a kernel with several, and a tensor that is also an output."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width = width
        self.qkv, self.out, self.norm = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.view(2, -1, 4, self.width // 4).transpose(1, 2) for t in (q, k, v))
        heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, -1, self.width)
        y = self.out(heads)
        return x + torch.sin(y) * F.gelu(y), y


def dropout(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.sin(x) @ x.transpose(0, 1), 0.5).square().sum()


def mixed_types(x: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x) @ x.transpose(0, 1)
    z = (y > 0) * torch.exp(y.to(torch.float64) / 100).to(torch.float32)
    return (z @ torch.cos(y)).sum()


def on_a_side_stream(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    side = torch.cuda.Stream()
    y = torch.sin(x @ w)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        a = torch.tanh(y @ w)
    b = torch.sigmoid(y @ w @ w)
    torch.cuda.current_stream().wait_stream(side)
    return (a @ w + b).sum()


def matmuls_to_the_host(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_matmul = op is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_CPU_OFFLOAD if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE


MATMULS_TO_THE_HOST = functools.partial(create_selective_checkpoint_contexts, matmuls_to_the_host)


def everything(model: Model, budget: int, link: Link) -> Any:
    model.candidates = [dataclasses.replace(c, must=True) for c in model.candidates]
    return choose(model, budget, link)


@torch.library.custom_op(
    "test_offload::noise", mutates_args=(), tags=(torch.Tag.pointwise, torch.Tag.nondeterministic_seeded)
)
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.rand_like(x)


@noise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def recomputing(model: Model, budget: int, link: Link) -> Any:
    """Every candidate leaves the device; what can be computed again, of others that can't, is."""
    found = everything(model, budget, link)
    again: dict[str, Candidate] = {}
    for c in model.candidates:
        read = {name for other in again.values() if other.again is not None for name in other.again.reads}
        if c.again is not None and not c.again.reads & again.keys() and c.name not in read:
            again[c.name] = c
    chosen = tuple(name for name in found.chosen if name not in again)
    return dataclasses.replace(found, chosen=chosen, recomputed=tuple(again))


ALL = {"budget_gb": 100.0, "min_bytes": 0}
RATES = device_rates.Rates(Link(1e4, 1e4, 1.0), 1e6, 1e6, False)


@contextlib.contextmanager
def offloading(option: Any = None, all_of_it: bool = False, by: Callable[..., Any] = everything) -> Iterator[list[Any]]:
    """With the option; with `all_of_it`, every candidate goes to the host, or what `by` says. Yields the reports."""
    found: list[Any] = []
    undo = log.subscribe(found.append)
    chosen = mock.patch.object(decision, "choose", by) if all_of_it else contextlib.nullcontext()
    try:
        with config.patch(activation_offload=ALL if all_of_it else option), chosen:
            yield found
    finally:
        undo()


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Graphs of the CPU are rewritten as if it were a device."""
    with (
        mock.patch.object(candidates, "DEVICE_TYPE", "cpu"),
        mock.patch.object(decision, "rates", lambda index: RATES),
        mock.patch.object(device_rates.Rates, "flops_of", lambda *args: 1e6),
        host_slabs(),
    ):
        yield


def interpret(fn: Callable[..., Any]) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, backend="aot_eager_decomp_partition", fullgraph=True)


def gradients(fn: Callable[..., Any], inputs: list[torch.Tensor], parameters: Sequence[torch.Tensor] = ()) -> list[Any]:
    leaves = [*inputs, *parameters]
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(7)
    outputs = torch.utils._pytree.tree_leaves(fn(*inputs))
    sum(o.sum() for o in outputs).backward()
    return [*(o.detach() for o in outputs), *(leaf.grad for leaf in leaves)]


class TestValues(TestCase):
    def check(
        self, fn: Any, *inputs: torch.Tensor, parameters: Any = (), least: int = 1, by: Callable[..., Any] = everything
    ) -> Any:
        given, parameters = [i.clone().requires_grad_() for i in inputs], list(parameters)
        with on_the_cpu():
            expected = gradients(interpret(fn), given, parameters)
            with offloading(all_of_it=True, by=by) as reports:
                compiled = interpret(fn)
                for _ in range(2):
                    self.assertEqual(gradients(compiled, given, parameters), expected, rtol=0, atol=0)
            self.assertEqual(offload_runtime.live()["in_use"], 0)
        (report,) = reports
        self.assertGreaterEqual(len(report.rows), least)
        return report

    def test_chain(self) -> None:
        model = Chain(32)
        self.check(model, torch.randn(8, 32), parameters=model.parameters(), least=7)

    def test_saved_views_are_made_again_from_their_base(self) -> None:
        model = Attention()
        report = self.check(model, torch.randn(2, 32, 64), parameters=model.parameters(), least=4)
        self.assertIn("addmm", [row.name for row in report.rows])

    def test_computed_again(self) -> None:
        """With equal values: the same operations on the same inputs."""
        for model, x, least in ((Chain(32), torch.randn(8, 32), 3), (Attention(), torch.randn(2, 32, 64), 0)):
            report = self.check(model, x, parameters=model.parameters(), least=0, by=recomputing)
            self.assertGreaterEqual(len(report.choice.recomputed), least)

    def test_what_the_caller_gets_stays(self) -> None:
        def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = torch.sin(x) @ x
            return y, torch.cos(y) @ torch.exp(x)

        report = self.check(fn, torch.randn(16, 16))
        self.assertNotIn("mm", [row.name for row in report.rows])

    def test_random_numbers(self) -> None:
        self.check(dropout, torch.randn(16, 16))

    def test_random_numbers_are_not_drawn_again(self) -> None:
        """Not even those of an operator that says it is pointwise."""

        def fn(x: torch.Tensor) -> torch.Tensor:
            y = torch.nn.functional.dropout(torch.sin(x), 0.5)
            return torch.exp(y * noise(y.detach())) @ x

        report = self.check(fn, torch.randn(16, 16), least=0, by=recomputing)
        self.assertGreater(len(report.choice.recomputed), 0)

    def test_types(self) -> None:
        self.check(mixed_types, torch.randn(16, 16))

    def test_two_forwards_alive_and_backwards_in_either_order(self) -> None:
        model = Chain(32)
        inputs = [torch.randn(8, 32, requires_grad=True) for _ in range(2)]
        with on_the_cpu():
            expected = [gradients(model, [x])[1] for x in inputs]
            with offloading(all_of_it=True):
                compiled = interpret(model)
                for order in ((0, 1), (1, 0)):
                    losses = [compiled(x) for x in inputs]
                    self.assertEqual(offload_runtime.live()["in_use"], 2)
                    for i in order:
                        inputs[i].grad = None
                        losses[i].backward()
                        self.assertEqual(inputs[i].grad, expected[i])
            self.assertEqual(offload_runtime.live()["slabs"], 2)

    def test_retained_graph_runs_twice(self) -> None:
        model = Chain(32)
        x = torch.randn(8, 32, requires_grad=True)
        with on_the_cpu(), offloading(all_of_it=True), torch._functorch.config.patch(donated_buffer=False):
            expected = gradients(model, [x])[1]
            x.grad = None
            loss = interpret(model)(x)
            for retain, in_use in ((True, 1), (False, 0)):
                loss.backward(retain_graph=retain)
                self.assertEqual(offload_runtime.live()["in_use"], in_use)
            self.assertEqual(x.grad, 2 * expected)

    def test_no_grad_takes_no_slab(self) -> None:
        with on_the_cpu(), offloading(all_of_it=True), torch.no_grad():
            interpret(Chain(32))(torch.randn(8, 32))
            self.assertEqual(offload_runtime.live()["slabs"], 0)

    def test_dynamic_sizes_stay_and_the_rest_goes(self) -> None:
        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            v = torch.sin(w) @ w
            return torch.cos(x @ v).sum() + torch.exp(v @ v).sum()

        x, w = torch.randn(8, 16), torch.randn(16, 16, requires_grad=True)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        with on_the_cpu(), offloading(all_of_it=True) as reports:
            compiled = interpret(fn)
            for rows in (8, 11):
                x = torch.randn(rows, 16)
                torch._dynamo.mark_dynamic(x, 0)
                w.grad = None
                compiled(x, w).backward()
                got, w.grad = w.grad, None
                fn(x, w).backward()
                self.assertEqual(got, w.grad)
        self.assertEqual(len(reports), 1)

    def test_checkpoint_policy_sends_what_it_names(self) -> None:
        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            def block(x: torch.Tensor) -> torch.Tensor:
                return torch.sin(torch.sin(x @ w) @ w)

            return checkpoint(block, x, use_reentrant=False, context_fn=MATMULS_TO_THE_HOST).sum()

        x, w = torch.randn(16, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
        with on_the_cpu(), offloading(None) as reports:
            expected = gradients(fn, [x, w])
            self.assertEqual(gradients(interpret(fn), [x, w]), expected)
        (report,) = reports
        self.assertEqual([row.name for row in report.rows], ["mm", "mm_1"])


class TestDecision(TestCase):
    def compile(self, option: Any) -> Any:
        with simulated_gpu(), torch.device("cuda"):
            model, x = Chain(), torch.randn(4096, 256)
        with offloading(option):
            return compile_only(model, x, backward=True, allow_error=True)

    def test_budget_that_fits_changes_nothing(self) -> None:
        plain, wide = self.compile(None), self.compile({"budget_gb": 1.0})
        self.assertEqual(wide.calls(), plain.calls())
        self.assertEqual(wide.offloads, [])

    def test_budget_that_is_too_small_says_what_would_fit(self) -> None:
        seen = self.compile({"budget_gb": 0.001, "min_bytes": 0})
        found = re.search(r"a budget of 1.00 MB is too small.* Set budget_gb to ([\d.]+) or more", str(seen.error))
        self.assertIsNotNone(found, seen.error)
        assert found is not None
        again = self.compile({"budget_gb": float(found[1]), "min_bytes": 0})
        self.assertIsNone(again.error)
        self.assertEqual(len(again.offloads), 1)

    def test_without_strict_training_goes_on_without_offload(self) -> None:
        logger = decision.__name__
        with self.assertLogs(logger, "WARNING") as logs:
            seen = self.compile({"budget_gb": 0.001, "min_bytes": 0, "strict": False})
        self.assertIsNone(seen.error)
        self.assertEqual(seen.offloads, [])
        self.assertIn("Training goes on without offload", logs.output[0])

    @form.slow
    def test_auto_takes_what_the_device_has_free_less_room_for_an_optimizer(self) -> None:
        gradients = 4 * 256 * 256 * 4
        total = 140_000_000_000
        for free, fraction, held, expected in (
            (30_000_000, 1.0, (0, 0), 0.9 * 30_000_000),
            (20_000_000, 1.0, (25_000_000, 15_000_000), 0.9 * 30_000_000),  # 10 MB are the allocator's, and unused
            (total, 40_000_000 / total, (10_000_000, 10_000_000), 0.9 * 30_000_000),
        ):
            reserved, allocated = held
            answers = {
                "mem_get_info": (free, total),
                "get_per_process_memory_fraction": fraction,
                "memory_reserved": reserved,
                "memory_allocated": allocated,
            }
            mocks = {name: mock.Mock(return_value=value) for name, value in answers.items()}
            with mock.patch.multiple(torch.cuda, **mocks):
                seen = self.compile("auto")
            self.assertIsNone(seen.error)
            (report,) = seen.offloads
            self.assertLess(abs(report.budget - int(expected - 2 * gradients)), 10)
            self.assertLessEqual(report.choice.peak, report.budget)

    def test_auto_offloads_as_much_as_can_be_where_that_is_not_enough(self) -> None:
        with (
            mock.patch.object(decision, "free_bytes", lambda *_: 1_000_000),
            self.assertLogs(decision.__name__, "WARNING") as logs,
        ):
            seen = self.compile("auto")
        self.assertIsNone(seen.error)
        self.assertIn("As much as can be is offloaded", logs.output[0])
        choice = seen.offloads[0].choice
        self.assertLess(choice.peak, choice.peak_before)
        self.assertEqual(choice.peak, choice.least)

    @form.slow
    def test_policy_goes_with_a_budget(self) -> None:
        """What a policy names goes to the host though the budget wouldn't need it; the budget takes what is missing."""

        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = checkpoint(lambda x: torch.sin(x @ w), x, use_reentrant=False, context_fn=MATMULS_TO_THE_HOST)
            for _ in range(4):
                y = torch.tanh(y @ w)
            return y.sum()

        with simulated_gpu(), torch.device("cuda"):
            x, w = torch.randn(4096, 256), torch.randn(256, 256, requires_grad=True)
        names = []
        for option in (None, {"budget_gb": 1.0}, {"budget_gb": 0.017, "min_bytes": 0}):
            with offloading(option):
                (report,) = compile_only(fn, x, w, backward=True).offloads
            names.append([row.name for row in report.rows])
        self.assertEqual(names[0], ["mm"])
        self.assertEqual(names[1], ["mm"])
        self.assertIn("mm", names[2])
        self.assertGreater(len(names[2]), 1)

    def test_small_tensors_stay(self) -> None:
        seen = self.compile({"budget_gb": 0.03, "min_bytes": 1 << 30, "strict": False})
        self.assertEqual(seen.offloads, [])

    def test_plan_of_the_graph_and_of_the_schedule_agree(self) -> None:
        """The peak that the choice is made by is the one that the final schedule has."""
        highest = []
        place = Schedule.place

        def keep(schedule: Any) -> Any:
            highest.append(max(schedule.live(set())))
            return place(schedule)

        with mock.patch.object(Schedule, "place", keep):
            seen = self.compile({"budget_gb": 0.024, "min_bytes": 0})
        self.assertLessEqual(abs(max(highest) - seen.offloads[0].choice.peak), 4.3e6)

    def test_schedule_counts_views_of_one_tensor_once(self) -> None:
        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            parts = [part.transpose(0, 1) for part in (x @ w).chunk(4, 1)]
            y = torch.sin(parts[0] @ parts[1].t()) @ torch.cos(parts[2] @ parts[3].t())
            return torch.tanh(y).sum()

        saved = []
        place = Schedule.place

        def keep(schedule: Any) -> Any:
            saved.append(schedule.saved())
            return place(schedule)

        with simulated_gpu(), torch.device("cuda"):
            x, w = torch.randn(512, 512), torch.randn(512, 2048, requires_grad=True)
        with mock.patch.object(Schedule, "place", keep), offloading({"budget_gb": 0.01, "min_bytes": 0}):
            (report,) = compile_only(fn, x, w, backward=True).offloads
        self.assertNotIn("mm", [row.name for row in report.rows])  # the product of 4 MiB, of which four views are saved
        large = [size for size, _ in saved[-1] if size > 1 << 20]
        self.assertEqual([round(size / 2**20) for size in large], [4])

    def test_explain_table_knows_each_copy(self) -> None:
        seen = self.compile({"budget_gb": 0.024, "min_bytes": 0})
        forward, backward = (r.copies for r in seen.regions)
        for row in seen.offloads[0].rows:
            self.assertRegex(forward.text(row.name), r"^\d+ / (\d+|end) of \d+$")
            self.assertRegex(backward.text(row.name), r"^\d+ / \d+ of \d+$")
            self.assertIn("gelu", row.stack_trace)


class TestWrapper(TestCase):
    maxDiff = None

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()

        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch.cos(torch.sin(x @ w) @ w).sum()

        with simulated_gpu(), offloading(all_of_it=True):
            args = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda", requires_grad=True)
            cls.seen = compile_only(fn, *args, backward=True)
            cls.graphed = compile_only(fn, *args, backward=True, mode="reduce-overhead")

    def lines(self, index: int) -> str:
        wanted = (
            r"take_slab|note_use|copy_(in|out)\(|\.(record|wait)\(|extern_kernels|\.run\(|set_stream|del buf|# reuse"
        )
        kept = [line.strip() for line in self.seen.calls(index).splitlines() if re.search(wanted, line)]
        return re.sub(r"reinterpret_tensor\((\w+), [^)]*\)[^)]*\)[^)]*\)", r"\1", "\n".join(kept))

    def test_store_stands_behind_its_producer_and_memory_is_freed_behind_a_wait(self) -> None:
        text = self.lines(0)
        first = re.search(
            r"out=(\w+)\)\nev0.record\(stream0_raw\)\nev0.wait\(stream_out_raw\)\nset_stream\(stream_out\)\n"
            r"copy_out\(buf0, \1, 0\)",
            text,
        )
        self.assertIsNotNone(first, text)
        self.assertEqual(text.count("copy_out("), 3)
        self.assertNotIn("synchronize", text)

    def test_store_of_an_updated_value_stands_after_the_update(self) -> None:
        """Inductor updates a copy of the product in place: it is written twice, and both values are saved."""

        def fn(x: torch.Tensor, w: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            y = x @ w
            z = y.index_put((index,), x @ w.t(), accumulate=True)
            return torch.cos(z @ w).sum() + torch.sin(y @ w).sum()

        with simulated_gpu(), offloading(all_of_it=True) as reports:
            x, w = (torch.randn(256, 256, device="cuda", requires_grad=True) for _ in range(2))
            seen = compile_only(fn, x, w, torch.zeros(256, dtype=torch.int64, device="cuda"), backward=True)
        self.assertIn("index_put", [row.name for row in reports[0].rows])
        text = seen.calls(0)
        updated = re.search(r"index_put\w*\.run\(.*?(\w+), \d+, stream=", text)
        assert updated is not None
        store = f"copy_out(buf0, {updated.group(1)}, "
        self.assertEqual((text[: updated.start()].count(store), text.count(store)), (1, 2), text)

    def test_product_that_a_pass_makes_of_a_loaded_value_is_computed_on_the_callers_stream(self) -> None:
        """A pass merges the sum of two gradients with one of the products, which reads the loaded value."""

        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y, z = torch.sin(x) @ w, torch.cos(w @ w)
            return (y @ z).sum() + torch.sin(z @ y).sum()

        with simulated_gpu(), offloading(all_of_it=True):
            seen = compile_only(
                fn, *(torch.randn(256, 256, device="cuda", requires_grad=True) for _ in range(2)), backward=True
            )
        self.check_that_only_copies_are_on_their_stream(seen.calls(1), "in")

    def test_product_that_a_pass_makes_and_that_is_stored_is_computed_on_the_callers_stream(self) -> None:
        def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.cos((x @ w + b) @ w).sum()

        with simulated_gpu(), offloading(all_of_it=True):
            x, w, b = (torch.randn(size, device="cuda", requires_grad=True) for size in ((256, 256), (256, 256), 256))
            text = compile_only(fn, x, w, b, backward=True).calls(0)
        self.check_that_only_copies_are_on_their_stream(text, "out")

    def check_that_only_copies_are_on_their_stream(self, text: str, direction: str) -> None:
        self.assertIn("addmm", text)
        first = {launch.partition("(")[0] for launch in re.findall(rf"set_stream\(stream_{direction}\)\n *(.*)", text)}
        self.assertEqual(first, {f"copy_{direction}"}, text)

    def test_load_is_allocated_on_the_ambient_stream_and_its_reader_waits(self) -> None:
        text = self.seen.calls(1)
        loads = re.findall(r"copy_in\((\w+), slab\w*, \d+\)\n *(ev\d+)\.record\(stream_in_raw\)", text)
        self.assertEqual(len(loads), 3, text)
        for buffer, event in loads:
            allocated, launched, awaited = (
                text.index(f"{buffer} = empty_strided_cuda"),
                text.index(f"copy_in({buffer}"),
                text.index(f"{event}.wait(stream0_raw)"),
            )
            self.assertLess(allocated, launched)
            self.assertLess(launched, awaited)
            switches = re.findall(r"set_stream\((\w+)\)", text[:allocated])
            self.assertIn(switches[-1:], ([], ["stream0"]))

    def test_slab_lives_until_the_copies_from_it_are_joined(self) -> None:
        self.assertNotRegex(self.seen.calls(1), r"del slab")

    def test_forward_joins_its_copies(self) -> None:
        self.assertRegex(self.seen.calls(0), r"exit=.*  # wait ev\d+ stream0\n|ev\d+.wait\(stream0_raw\)")

    def test_host_work_is_split_from_the_captured_partition(self) -> None:
        text = self.graphed.calls()
        for partition in re.findall(r"def partition_\d+\(args\):\n((?:    .*\n)*)", text):
            self.assertNotRegex(partition, "take_slab|note_use")
        self.assertEqual(len(re.findall(r"def partition_\d+", text)), 2)
        self.assertEqual(text.count("copy_out("), 3)
        self.assertEqual(text.count("copy_in("), 3)

    def test_streams_are_those_of_the_copies(self) -> None:
        for index, stream in enumerate(("900000.*stream_out", "900001.*stream_in")):
            self.assertRegex(self.seen.calls(index), rf"\n    streams=\(.*{stream}")
        self.assertNotIn("distinct", self.seen.calls())


@instantiate_parametrized_tests
class TestRaces(TestCase):
    def compile(self, fn: Any, make: Callable[[], Any], option: Any, by: Callable[..., Any]) -> Any:
        with simulated_gpu():
            with torch.device("cuda"):
                model = fn() if isinstance(fn, type) else fn
                args = make()
            with offloading(option, option is None, by):
                return compile_only(model, *args, backward=True)

    def check(self, fn: Any, make: Callable[[], Any], option: Any = None, by: Callable[..., Any] = everything) -> Any:
        seen = self.compile(fn, make, option, by)
        forward, backward = [r for r in seen.regions if r.wrapper]
        self.assertIn("copy_out(", forward.wrapper)
        self.assertIn("copy_in(", backward.wrapper)
        with simulated_gpu():
            check_step(forward, backward, steps=3).raise_if_any()
        return forward, backward

    def test_chain(self) -> None:
        self.check(Chain, lambda: [torch.randn(512, 256)])

    @form.slow
    @parametrize("megabytes", [20, 22, 24, 26, 28, 30])
    def test_chain_at_a_budget(self, megabytes: int) -> None:
        option = {"budget_gb": megabytes / 1000, "min_bytes": 0}
        with mock.patch.object(device_rates, "LINK", Link(1e6, 1e6, 0.1)):
            self.check(Chain, lambda: [torch.randn(4096, 256)], option)

    @form.slow
    def test_attention(self) -> None:
        self.check(Attention, lambda: [torch.randn(2, 128, 64)])

    @form.slow
    @parametrize("fn", [Chain, Attention])
    def test_computed_again(self, fn: Any) -> None:
        shape = (512, 256) if fn is Chain else (2, 128, 64)
        self.check(fn, lambda: [torch.randn(*shape)], by=recomputing)

    @form.slow
    def test_dropout(self) -> None:
        self.check(dropout, lambda: [torch.randn(256, 256, requires_grad=True)])

    @form.slow
    def test_with_streams_of_the_user(self) -> None:
        with config.patch(fold_branches_below_us=0.0):
            self.check(on_a_side_stream, lambda: [torch.randn(256, 256, requires_grad=True) for _ in range(2)])

    @form.slow
    def test_model_without_its_waits_is_found(self) -> None:
        """The check can fail: each kind of order, taken out, is reported."""
        forward, backward = self.check(Chain, lambda: [torch.randn(512, 256)])
        for region, order in (
            (forward, r"\n *ev\d+\.wait\(stream_out_raw\)"),
            (backward, r"\n *ev\d+\.wait\(stream0_raw\)"),
            (backward, r"\n *ev\d+\.wait\(stream_in_raw\)"),
        ):
            wrapper = region.wrapper
            region.wrapper, count = re.subn(order, "", wrapper)
            self.assertGreater(count, 0)
            with simulated_gpu():
                self.assertFalse(check_step(forward, backward, steps=3).ok)
            region.wrapper = wrapper


class TestGraphs(TestCase):
    """What relaunch makes of copies to and from slabs, without a device."""

    def test_slab_is_a_part_of_the_key_by_its_address_and_number(self) -> None:
        with host_slabs():
            slabs = [offload_runtime.take_slab(1024, 0) for _ in range(2)]
            key_of = runner.keys.key_of([0], [1])
            keys = [key_of([3, slab]) for slab in slabs]
            self.assertEqual([key[1][0] for key in keys], [slab.data_ptr() for slab in slabs])
            self.assertEqual(keys[0], key_of([3, slabs[0]]))
            self.assertNotEqual(*keys)
            self.assertEqual(key_of([3, torch.tensor([1, 2])]), (3, (torch.int64, 1, 2)))
            # Another slab, which has come to lie at the same address.
            found = offload_runtime.slab_of(slabs[0])
            assert found is not None
            found.number += 1000
            self.assertNotEqual(keys[0], key_of([3, slabs[0]]))

    def test_other_large_tensors_of_the_host_are_refused_still(self) -> None:
        with host_slabs():
            self.assertTrue(offload_runtime.is_slab(offload_runtime.take_slab(1024, 0)))
            self.assertFalse(offload_runtime.is_slab(torch.zeros(1024, dtype=torch.uint8)))

    def test_copy_node_with_the_host_at_one_end_keeps_that_end(self) -> None:
        import struct

        node = CopyNode(0, 7, (CopySide(0x7000_0000_0000, 64, 1, True), CopySide(0x7100_0000_0000, 64, 1)), 64, 1, 1)
        _, _, _, block, _ = executable._block(node)
        words = struct.unpack("<25Q", block)
        self.assertEqual(words[:11], (0, 0, 0, 0, executable.ON_DEVICE, 0, 0x7100_0000_0000, 0, 0, 64, 1))
        self.assertEqual(words[11:22], (0, 0, 0, 0, executable.ON_HOST, 0x7000_0000_0000, 0, 0, 0, 64, 1))
        self.assertEqual(words.index(0x7100_0000_0000) * 8, executable.MEMCPY_SOURCE)

    def test_region_that_joins_its_copies_at_the_exit_can_be_captured(self) -> None:
        record, wait, leave = OperationKind.RECORD, OperationKind.WAIT, OperationKind.WAIT_EXIT
        joins = RegionSpec(0, (of_device(0), copy_out_stream(0)), 2, exit=((record, 0, 1), (wait, 0, 0)))
        hands_back = RegionSpec(0, (of_device(0), 1), 2, exit=((record, 0, 0), (leave, 0, 1)))
        self.assertFalse(orders_others(joins))
        self.assertTrue(orders_others(hands_back))

    def test_copy_streams_are_exchanged_for_a_capture(self) -> None:
        given: list[int] = []
        with offload_runtime.exchanged(lambda number: given.append(number) or "captured"):
            self.assertEqual(offload_runtime.copy_stream(900001), "captured")
        self.assertEqual(given, [900001])


# ---- with a GPU


def release() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


@form.needs_gpu
@instantiate_parametrized_tests
class TestGpu(TestCase):
    def tearDown(self) -> None:
        torch._dynamo.reset()
        gc.collect()
        offload_runtime.release_free()
        super().tearDown()

    def step(self, option: Any, mode: str | None, steps: int = 6, frames: int = 1) -> tuple[list[Any], int, Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.GELU()) for _ in range(8))).cuda()
        inputs = [torch.randn(8192, 1024, device="cuda") for _ in range(3)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with offloading(option) as reports:
            compiled = torch.compile(lambda x: model(x).square().mean(), mode=mode, fullgraph=True)
            seen: list[Any] = []
            for i in range(steps):
                if i == steps // 2:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                losses = [compiled(inputs[(i + k) % 3]) for k in range(frames)]
                for loss in reversed(losses):
                    loss.backward()
                if i == steps - 1:
                    seen += [p.grad.clone() for p in model.parameters()]
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                seen.append([loss.item() for loss in losses])
        return seen, torch.cuda.max_memory_allocated(), [r for r in reports if hasattr(r, "choice")]

    @parametrize("mode", ["default", "reduce-overhead"])
    @parametrize("frames", [1, 2])
    def test_losses_and_gradients_are_equal_and_the_peak_is_lower(self, mode: str, frames: int) -> None:
        wanted = None if mode == "default" else mode
        before = set(causes.refusals())
        expected, plain, _ = self.step(None, wanted, frames=frames)
        found, lower, reports = self.step({"budget_gb": 0.35}, wanted, frames=frames)
        self.assertEqual(found, expected, rtol=0, atol=0)
        self.assertEqual(len(reports), 1)
        if frames == 1:
            self.assertLess(lower, plain - reports[0].choice.nbytes // 2)
        self.assertEqual(offload_runtime.live()["in_use"], 0)
        self.assertEqual(set(causes.refusals()) - before, set())

    def test_copies_that_the_driver_will_not_point_elsewhere(self) -> None:
        """As if the graph's copies had been left at the addresses of the capture: there are no graphs of such code."""
        before = len(causes.refused())
        expected, _, _ = self.step(None, "reduce-overhead")
        with mock.patch.object(executable, "settle", lambda *args: None):
            found, _, _ = self.step({"budget_gb": 0.35}, "reduce-overhead")
        self.assertEqual(found, expected, rtol=0, atol=0)
        self.assertEqual({refused.code for refused in causes.refused()[before:]}, {"host-memory"})

    def test_what_upstream_marks_waits_on_the_host(self) -> None:
        """S8: on stock the sine reads a storage that is gone."""

        def mark(joint: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
            for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
                node.meta["should_offload"] = True
            return joint

        def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = x @ w
            return (torch.relu(y) + torch.sin(y)).sum()

        x, w = torch.randn(2048, 1024, device="cuda"), torch.randn(1024, 1024, device="cuda", requires_grad=True)
        options = {"enable_activation_offloading": True, "activation_offload_separate_stream": True}
        with torch._functorch.config.patch(**options, joint_custom_pass=mark), offloading(None) as reports:
            compiled = torch.compile(fn)
            for _ in range(3):
                (found,) = torch.autograd.grad(compiled(x, w), w)
        (expected,) = torch.autograd.grad(fn(x, w), w)
        self.assertEqual(found, expected, rtol=1e-4, atol=1e-2)
        self.assertEqual([row.name for r in reports if hasattr(r, "choice") for row in r.rows], ["mm"])

    def test_library_kernels_are_measured_once_and_their_memory_goes_back(self) -> None:
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
            profile_cache.forget()
            asked: list[Any] = []
            us = kernel_times._us

            def note(node: torch.fx.Node) -> float:
                asked.append(kernel_times.name_of(node))
                return us(node)

            # A graph pair from a cache has no plan.
            planned = torch._functorch.config.patch(enable_autograd_cache=False)
            with planned, mock.patch.object(kernel_times, "_us", note):
                _, _, first = self.step({"budget_gb": 0.35}, None, steps=2)
                profile_cache.forget()
                _, _, second = self.step({"budget_gb": 0.35}, None, steps=2)
            known = profile_cache.profile(0).known
        profile_cache.forget()
        self.assertTrue(first[0].rates.measured)
        self.assertEqual(len(asked), len(set(asked)))
        self.assertEqual([r.name for r in first[0].rows], [r.name for r in second[0].rows])
        times = [us for name, us in known.items() if "aten.mm" in name]
        self.assertGreaterEqual(len(times), 2)
        # 2 x 8192 x 1024 x 1024 operations of 32 bits: between 10 us and 3 ms on anything that runs this.
        self.assertTrue(all(10 < t < 3000 for t in times), known)
        self.assertGreater(known[device_rates.OUT], 1e3)

    def test_measuring_leaves_random_numbers_and_memory_as_they_were(self) -> None:
        torch.cuda.manual_seed(5)
        torch.empty(1, device="cuda")
        state, reserved = torch.cuda.get_rng_state(), torch.cuda.memory_reserved()
        with device_rates.measuring(0):
            torch.randn(1 << 24, device="cuda")
        self.assertEqual(torch.cuda.get_rng_state(), state)
        self.assertEqual(torch.cuda.memory_reserved(), reserved)

    def test_batch_that_does_not_fit_trains_with_auto(self) -> None:
        expected, peak, _ = self.step(None, None)
        release()
        limit = int(0.85 * peak) / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(limit)
        try:
            with self.assertRaises(torch.OutOfMemoryError):
                self.step(None, None)
            release()
            found, _, reports = self.step("auto", None)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        self.assertEqual(found, expected, rtol=0, atol=0)
        self.assertGreater(len(reports[0].rows), 0)

    def test_slow_device_work_does_not_let_a_slab_be_overwritten(self) -> None:
        """The host is far before the device for many steps."""
        expected, _, _ = self.step(None, None, steps=20)
        found, _, _ = self.step({"budget_gb": 0.3}, None, steps=20)
        self.assertEqual(found, expected, rtol=0, atol=0)

    def test_retained_graph(self) -> None:
        torch.manual_seed(0)
        model = Chain(1024).cuda()
        x = torch.randn(4096, 1024, device="cuda", requires_grad=True)
        with offloading({"budget_gb": 0.1, "min_bytes": 0}), torch._functorch.config.patch(donated_buffer=False):
            loss = torch.compile(model)(x)
            loss.backward(retain_graph=True)
            first = x.grad.clone()
            loss.backward()
        self.assertEqual(x.grad, 2 * first)

    def test_another_stream_for_each_step(self) -> None:
        torch.manual_seed(0)
        model = Chain(1024).cuda()
        x = torch.randn(4096, 1024, device="cuda")
        with offloading({"budget_gb": 0.1, "min_bytes": 0}):
            compiled = torch.compile(model)
            expected = None
            torch.cuda.synchronize()
            for _ in range(6):
                with torch.cuda.stream(torch.cuda.Stream()):
                    model.zero_grad()
                    compiled(x).backward()
                    grads = [p.grad.clone() for p in model.parameters()]
                torch.cuda.synchronize()
                expected = expected or grads
                self.assertEqual(grads, expected, rtol=0, atol=0)
