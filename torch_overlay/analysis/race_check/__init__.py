"""Finds races: `trace` says what is launched, `happens_before` which accesses have no order.

`checking` runs compiled code on a simulated device (so does `wrapper_check`; the `simulated_*` modules are the device),
`graph_check` reads a captured CUDA graph, `eager_check` watches eager code on a GPU. `kernel_ranges` reads from a
kernel's source which elements it touches, `race_report` says what was found.
"""
