"""The container wall, host side: containers, the channel to their guests, the pool."""
