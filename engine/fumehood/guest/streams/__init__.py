"""The guest's ends of streams: each module is one kind, and its class `End` serves the stream.

The part of the host that owns a kind opens the streams of this kind. When a run starts, the host
tells the guest which streams the run has.
"""
