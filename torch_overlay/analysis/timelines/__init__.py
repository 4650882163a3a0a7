"""Timelines of a call: `run` measures or simulates it (`clock`, `device`, `profile`), `model` keeps it.

`timeline` is the public class, `layout` and `lines` arrange it, `svg` and `json` write it, `offload` adds copies of
saved activations.
"""
