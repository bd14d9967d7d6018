"""The pipeline: one call from request to envelope, one file for each stage.

Host side. Read `run.py` first; it lists the stages in order. `execute.py` also has the stage admit.
Each stage takes the value of the stage before it and returns its own, or raises one `EngineError`.
"""
