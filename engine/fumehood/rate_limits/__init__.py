"""Rate limits: how often a tool may be called, for each of what a limit counts by.

Host side. The pipeline calls `limiter` beside the budgets: `hold` before a call waits for its
place, `take` when it starts, `release` if it does not.
"""
