"""Walls made of Docker containers, and the images that they are made from."""
