"""The pipeline: one call from request to envelope, one file for each stage.

Host side. Read `run.py` first; it has the stages in order. Each stage takes the value of the
one before and returns the next, or raises one `EngineError`.
"""
