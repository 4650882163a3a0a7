"""Timelines of a call: `timeline` simulates it (`clock`) or measures it (`profile`), and has the public class.

`lines` names the work, `model` has the parts of a timeline, `layout` arranges them in the picture that `svg` draws.
"""
