"""The container wall, host side: Docker containers, and the images that they are made from."""
