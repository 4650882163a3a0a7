"""Programs that launch something outside of CUDA graphs, one for each cause, with what brings it into a graph.

The line that is at fault ends with a comment: `# outside: CODE OPERATOR` for work that runs between graphs,
`# outside: graph-break` for a graph break. `python test/outside_programs/run.py` runs them on a GPU.
"""

from outside_programs import custom_operators, graph_breaks, library_operators, splits, whole_regions
from outside_programs._program import by_name, Program, PROGRAMS


__all__ = [
    "Program",
    "PROGRAMS",
    "by_name",
    "custom_operators",
    "graph_breaks",
    "library_operators",
    "splits",
    "whole_regions",
]
