"""The data that processes exchange: frames, strict JSON, messages, events and cursors."""
