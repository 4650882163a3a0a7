# Owner(s): ["module: inductor"]

from types import SimpleNamespace
from unittest import mock

import torch._inductor.config as inductor_config
from torch._inductor import cudagraph_trees, output_code
from torch._inductor.cudagraph_relaunch.policy import RelaunchPolicy
from torch._inductor.cudagraph_utils import BoxedDeviceIndex, CUDAGraphPolicy
from torch.testing._internal.common_utils import run_tests, TestCase


class TestGenerations(TestCase):
    def handle(self, manager, policy, is_backward=True):
        """What is called instead of compiled code that has no graph; None: the code."""
        kwargs = {"is_backward": is_backward}
        graph = SimpleNamespace(fx_kwargs=kwargs, current_callable=len)
        with (
            mock.patch.object(cudagraph_trees, "get_manager", return_value=manager),
            inductor_config.patch(cudagraph_policy=policy),
        ):
            output_code.maybe_handle_backward_generation(graph, BoxedDeviceIndex(0))
        return None if graph.current_callable is len else graph.current_callable

    def test_policy_that_relaunches(self):
        for manager in (None, mock.Mock()):
            self.assertIsNone(self.handle(manager, RelaunchPolicy()))

    def test_trees(self):
        for policy in (None, CUDAGraphPolicy()):
            manager = mock.Mock()
            run = self.handle(manager, policy)
            self.assertEqual(run([1, 2]), 2)
            manager.set_to_running_backward.assert_called_once_with()
            with self.assertRaisesRegex(AssertionError, "manager must not be None"):
                self.handle(None, policy)
            self.assertIsNone(self.handle(None, policy, is_backward=False))


if __name__ == "__main__":
    run_tests()
