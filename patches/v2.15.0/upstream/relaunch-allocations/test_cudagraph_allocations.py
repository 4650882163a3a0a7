# Owner(s): ["module: inductor"]

import functools
import threading
import types

import torch
from torch._inductor.cudagraph_relaunch import allocations
from torch._inductor.cudagraph_relaunch.allocations import (
    ALLOCATOR,
    Lives,
    namespace_of,
    observed,
    Observer,
    Plan,
    storages,
    Watch,
)
from torch.testing._internal.common_utils import run_tests, TestCase


def empty(size, stride, dtype):
    return torch.empty_strided(size, stride, dtype=dtype)


def module(text):
    """The globals of generated code."""
    namespace = {"torch": torch, ALLOCATOR: empty}
    exec(text, namespace)
    return namespace


REGION = """
def call(args):
    (x,) = args
    args.clear()
    a = empty_strided_cuda((4,), (1,), torch.float32)
    torch.add(x, 1, out=a)
    b = empty_strided_cuda((4,), (1,), torch.float32)
    torch.mul(a, a, out=b)
    c = torch.neg(b)
    return a, c
"""


def address(tensor):
    return tensor.untyped_storage().data_ptr()


class TestObserver(TestCase):
    def test_numbers_of_allocations(self):
        namespace, observer = module(REGION), Observer()
        with observed(namespace, observer):
            a, c = namespace["call"]([torch.randn(4)])
        plan = observer.plan([address(a)], Plan(random=True))
        self.assertEqual(plan, Plan(frozenset([0]), random=True))
        plan = observer.plan([address(c)], plan)  # an operator made it
        self.assertEqual((plan.allocations, plan.watch), ({0}, True))
        self.assertEqual(observer.count, 2)

    def test_last_allocation_at_an_address(self):
        observer = Observer()
        for at in (0x10, 0x20, 0x10):
            observer.note(at)
        self.assertEqual(observer.plan([0x10], Plan()).allocations, {2})

    def test_function_is_put_back(self):
        namespace = module(REGION)
        with observed(namespace, Observer()):
            self.assertIsNot(namespace[ALLOCATOR], empty)
            with self.assertRaises(ZeroDivisionError), observed(namespace, Observer()):
                raise ZeroDivisionError
            self.assertIsNot(namespace[ALLOCATOR], empty)
        self.assertIs(namespace[ALLOCATOR], empty)
        self.assertEqual(allocations._hooks, {})

    def test_innermost_observer(self):
        namespace, (outer, inner) = module(REGION), (Observer(), Observer())
        with observed(namespace, outer):
            with observed(namespace, inner):
                namespace["call"]([torch.randn(4)])
            namespace["call"]([torch.randn(4)])
        self.assertEqual((outer.count, inner.count), (2, 2))

    def test_other_threads_are_not_observed(self):
        namespace, observer, entered, leave = (
            module(REGION),
            Observer(),
            *(threading.Event() for _ in "ab"),
        )

        def other():
            with observed(namespace, Observer()):
                entered.set()
                leave.wait(60)

        thread = threading.Thread(target=other)
        thread.start()
        entered.wait(60)
        namespace["call"]([torch.randn(4)])  # through the function that is there now
        with observed(namespace, observer):
            leave.set()
            thread.join()
            namespace["call"]([torch.randn(4)])  # the other has left
        self.assertEqual(observer.count, 2)
        self.assertIs(namespace[ALLOCATOR], empty)

    def test_code_that_does_not_allocate(self):
        namespace = {}
        for given in (namespace, None):
            with observed(given, Observer()):
                pass
        self.assertEqual(namespace, {})

    def test_globals_of_a_compiled_function(self):
        namespace = module(REGION)
        call = namespace["call"]
        bound = types.MethodType(call, object())
        for model in (call, functools.partial(call), bound, functools.partial(bound)):
            self.assertIs(namespace_of(model), namespace)
        self.assertIsNone(namespace_of(object()))


class TestWatch(TestCase):
    def watch(self, function, **kwargs):
        """Return the observer, and the numbers of the operators that were run."""
        observer, ran = Observer(), []

        def run(number, call):
            ran.append(number)
            return call()

        with Watch(observer, run, **kwargs) as watch:
            kept = function()
        self.assertEqual(watch.count, len(ran))
        self.kept = kept
        return observer, ran

    def test_operators_that_make_outputs(self):
        x = torch.randn(4)

        def function():
            y = x.t()  # a view makes nothing
            torch.add(x, 1, out=torch.empty(4))
            z = x.sin()
            return y, z, x.relu_()

        observer, ran = self.watch(function)
        self.assertEqual(ran, [None, 0, None, 1, None])  # empty() and sin() make some
        y, z, _ = self.kept
        plan = observer.plan([address(z)], Plan())
        self.assertEqual((plan.operators, plan.watch), ({1}, False))
        self.assertTrue(observer.plan([address(y)], Plan()).watch)  # it is x
        self.assertFalse(plan.opaque)

    def test_operators_of_others(self):
        with torch.library._scoped_library("test_allocations", "FRAGMENT") as library:
            library.define("twice(Tensor x) -> Tensor")
            library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
            twice = torch.ops.test_allocations.twice
            observer, _ = self.watch(lambda: twice(torch.randn(4)).sin())
        self.assertTrue(observer.opaque)
        self.assertTrue(observer.plan([], Plan()).opaque)

    def test_operators_of_tuning(self):
        def zeros():
            return torch.zeros(4)

        text = "def benchmark():\n    return torch.ones(4)"
        tuning = {"torch": torch, "__name__": allocations.TUNING}
        exec(text, tuning)
        scope = {"torch": torch, "benchmark": tuning["benchmark"]}
        exec("def call():\n    benchmark()\n    return torch.zeros(4)", scope)
        plans = []
        for function, kwargs in ((scope["call"], {"tuned_in": scope}), (zeros, {})):
            observer, ran = self.watch(function, **kwargs)
            plans.append((observer.plan([address(self.kept)], Plan()), len(ran)))
        self.assertEqual(plans[0], plans[1])
        self.assertEqual(len(plans[0][0].operators), 1)
        observer, ran = self.watch(scope["call"])
        self.assertGreater(len(ran), plans[0][1])  # else they are numbered

    def test_storages_of_a_tree(self):
        x, y = torch.randn(8), torch.randn(2, dtype=torch.float64)
        tree = [x[2:], {"y": (y,)}, torch.empty(0), 5, None, torch.eye(2).to_sparse()]
        self.assertEqual(storages(tree), {address(x): 32, address(y): 16})


class TestLives(TestCase):
    def test_times(self):
        lives, found = Lives(), {}
        for name in "abc":
            lives.tick()
            found[name] = tensor = torch.randn(4)
            lives.begin(tensor)
            if name == "b":
                del found["a"]
        at = [lives.made[a] for a in lives.made]
        self.assertEqual(at, [1, 2, 3])
        (a, b, c) = lives.made
        lives.tick()
        self.assertEqual(lives.life(a, 16).freed, 3)  # it was gone when c was made
        self.assertEqual((lives.life(b, 16).freed, lives.life(c, 16).made), (None, 3))
        self.assertEqual(lives.remaining(), [b, c])

    def test_storage_that_outlives_its_tensor(self):
        lives, tensor = Lives(), torch.randn(4)
        lives.begin(tensor)
        view, at = tensor[1:], address(tensor)
        del tensor
        lives.tick()
        lives.tick()
        self.assertIsNone(lives.life(at, 16).freed)
        del view
        lives.tick()
        self.assertEqual(lives.life(at, 16).freed, 3)
        self.assertEqual(lives.remaining(), [])

    def test_memory_inside_of_an_operator(self):
        lives = Lives()
        lives.tick()
        lives.note(0x10)
        life = lives.life(0x10, 5)
        self.assertEqual((life.size, life.made, life.freed), (5, 1, 2))
        lives.tick()
        lives.track_output(0x20)
        self.assertEqual(lives.life(0x20, 8).made, 2)
        self.assertEqual(lives.life(0x30, 8).made, 0)  # it was there before


if __name__ == "__main__":
    run_tests()
