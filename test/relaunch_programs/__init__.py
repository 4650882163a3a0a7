"""Programs that users compile with mode="reduce-overhead", each run by what it may do to a CUDA graph.

- outputs: how long they live, what they alias, what they are fed to
- layouts: dtypes, strides, alignment, sizes, inputs that are no GPU tensors
- mutation: inputs, buffers and caches that are written in place
- parameters: moved, swapped, loaded, frozen, stepped
- training: in which order forwards and backwards come, and what runs between them
- attention: its seeds, on the host or on the device
- rng: the same seed gives the same numbers as without graphs
- shapes: many sizes
- steps: many sizes without a graph
- sizes: many sizes that share an executable graph
- numbers: integers and floats that change from call to call
- kernels: of the user's own, of templates, of operators that allocate
- conditions: branches that a tensor chooses
- concurrency: kernels that run side by side, and the memory that they share
- scratch: memory that stays allocated between launches
- composition: several compiled functions, graph breaks, threads, streams
- environment: what is around the call: streams, captures, pools, memory that runs out
- host: small tensors in host memory, and what changes them
- lifetime: exceptions, resets, deletion, exit
- distributed: two processes, two GPUs

`_program` says what a program is, `_check` runs one and compares its sides.
"""

from relaunch_programs import (  # noqa: F401  (they register their programs)
    attention,
    composition,
    concurrency,
    conditions,
    distributed,
    environment,
    host,
    kernels,
    layouts,
    lifetime,
    mutation,
    numbers,
    outputs,
    parameters,
    rng,
    scratch,
    shapes,
    sizes,
    steps,
    training,
)
from relaunch_programs._program import by_name, Kit, Program, PROGRAMS


__all__ = ["Kit", "PROGRAMS", "Program", "by_name"]
