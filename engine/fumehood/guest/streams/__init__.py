"""The guest's ends of streams. Each module serves one kind of stream with its class `End`.

On the host, one feature of the engine owns each kind of stream, and opens the streams of this kind.
When a run starts, the host tells the guest which streams the run has.
"""
