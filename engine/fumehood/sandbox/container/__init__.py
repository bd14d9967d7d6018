"""The host side of the container wall: containers, the channels to their guests, and the pool."""
