"""How a tool runs. Each executor takes a place and arguments, and gives an `Outcome`."""
