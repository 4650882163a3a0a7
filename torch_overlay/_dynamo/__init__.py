"""Streams and events in traced programs, and the objects behind their numbers.

Begin with `state`: which stream is current on each device while a frame is traced. `registration` puts our handlers
into Dynamo's tables; `construct`, `contexts`, `functions` and `methods` trace one kind of expression each, by `ops`
where only the run knows the answer. `registry` numbers the streams of a frame while it is compiled, and fills the
record that the backend gets (`frame_facts`); `objects` finds streams by number in a call, and `hooks` puts both under
upstream's functions. `graph_breaks` takes streams across a break, and says of a complete graph what later layers need.
`ranges` traces profiler ranges. `compiled_backward` is compiled autograd's part.
"""
