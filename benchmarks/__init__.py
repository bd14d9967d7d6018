"""Benchmarks: run with `make bench` and `make soak`, never as tests."""
