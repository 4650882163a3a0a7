"""Streams in Inductor: from placed FX nodes to a plan of events, and from the plan to generated code."""
