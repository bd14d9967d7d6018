"""What travels between processes: bytes, frames, strict JSON, messages."""
