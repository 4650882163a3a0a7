"""Timelines of a call: `run` simulates it (`clock`) or measures it (`profile`); `timeline` has the public class.

`lines` names the work, `model` has the parts of a timeline, `layout` arranges them in the picture that `svg` draws.
"""
