"""The part gvisor: containers of gVisor that the launcher starts, without Docker."""
