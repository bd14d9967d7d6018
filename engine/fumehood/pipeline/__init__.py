"""The pipeline: one call from request to envelope, one file for each stage.

Host side. Read `run.py` first; it lists the stages in order. `execute.py` also contains the stage
`admit`. Each stage takes the value that the previous stage returned, and returns its own value or
raises one `EngineError`.
"""
