"""Stand-ins for a GPU, its driver, and what of PyTorch needs them: each once, for all tests.

c_module: a driver library in C, and the C module over it. memory_driver, stream_driver, relaunch_driver: its functions
for memory, for events and streams, for executables. graph_api: those that read and edit graphs.
relaunch_device: the device of `Runner`; relaunch_case and relaunch_host: test cases, and `torch.compile`, on it.
accelerator: streams while Dynamo traces. schedules: a GPU while Inductor's scheduler runs.
"""
