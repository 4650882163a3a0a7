"""CUDA graphs by relaunch: a region is captured once, and its graph is launched again on other memory.

Begin with `policy`: what relaunch is, and when it applies; `hooks` is where upstream calls it. Each region of compiled
code has a `runner.Runner`, whose calls find a state by key (`keys`, `states`); `region_graphs` makes what a state
launches, and `governor` when that may be. `capture` records the region, `graph` reads and edits what was recorded,
`proof` finds its pointers, `numbers` its numbers, `memory` lays it out, and `launch` launches it; `steps` has code
without a graph run in C. `rewrites` changes code before it is compiled; `causes` and `coverage` say what runs without a
graph, and why.
"""
