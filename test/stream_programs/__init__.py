"""A corpus of programs with streams and events, for tests that only compile and for tests that run on a GPU.

- idioms: every way to write a stream program that PyTorch's users have
- python_idioms: where programs keep their streams, and how they enter them
- waiting: events and streams that the host asks or waits for, and copies between host and device
- asynchronous_copies: copies between host and device, into memory that the program names
- hazards: what upstream's users reported, each named after what went wrong
- one_stream: functions whose whole body runs on one side stream
- memory: whose memory a block is, and when it may be freed
- parts: several streams write and read parts of one tensor
- training: steps with a forward, a backward and what stands around them; their names begin with `train_`
- training_hazards: the hazards above in training
- training_idioms: hooks, optimizers, checkpoints, precision, transforms and threads around such steps
- training_compiled_autograd: training whose backward compiled autograd traces
- random_training: such steps drawn at random
- compute: kinds of computation that reach the device in their own way, and larger programs
"""

from stream_programs import (  # noqa: F401  (they register their programs)
    asynchronous_copies,
    compute,
    hazards,
    idioms,
    memory,
    one_stream,
    parts,
    python_idioms,
    random_training,
    training,
    training_compiled_autograd,
    training_hazards,
    training_idioms,
    waiting,
)
from stream_programs._program import by_name, Instance, Program, PROGRAMS


__all__ = ["Instance", "PROGRAMS", "Program", "by_name"]
