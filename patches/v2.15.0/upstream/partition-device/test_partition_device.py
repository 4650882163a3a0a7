# Owner(s): ["module: inductor"]

from unittest import mock

import torch
from torch._inductor.graph import GraphLowering
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.virtualized import V


class TestPartitionDevice(TestCase):
    """The line that looks up the current stream, generated and run."""

    def lines(self, one_rank):
        """Those of a function and of a partition that it calls."""
        graph = GraphLowering(torch.fx.symbolic_trace(lambda x: x + 1))
        graph.device_types = {"cuda"}
        one_rank = torch.compiler.config.patch(compile_on_one_rank=one_rank)
        with one_rank, V.set_graph_handler(graph):
            graph.init_wrapper_code()
            wrappers = [graph.wrapper_code]
            graph.init_wrapper_code(True, "partition_0", wrappers[0])
            wrappers.append(graph.wrapper_code)
            for graph.wrapper_code in wrappers:
                graph.wrapper_code.write_get_raw_stream(1, graph.name)
        return [wrapper.lines[-1] for wrapper in wrappers]

    def run_line(self, line, **names):
        names |= {"get_raw_stream": lambda index: index, "torch": torch}
        with mock.patch.object(torch.cuda, "current_device", lambda: 3):
            exec(line, names)
        return names[line.partition(" = ")[0]]

    def test_code_for_all_ranks(self):
        function, partition = self.lines(one_rank=True)
        self.assertEqual(self.run_line(function, _coor_device_idx=3), 3)
        self.assertEqual(self.run_line(partition), 3)

    def test_code_for_one_device(self):
        for line in self.lines(one_rank=False):
            self.assertEqual(self.run_line(line), 1)


if __name__ == "__main__":
    run_tests()
