"""The guest's ends of streams: each module is one kind, and its class `End` serves the stream.

The host's part that owns a kind opens its streams, and tells the guest of them when a run starts.
"""
