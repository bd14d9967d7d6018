"""The result cache (a part): keeps the answers of cacheable tools in memory for a limited time.

Host side. `gate.py` is the cache's gate in the pipeline. `store.py` keeps the answers, and lets
identical calls that arrive at the same time share one run. Invariants: only successful results are
kept; the kept results never exceed the size in the settings; an answer is given only to the
principal and agent whose call produced it.
"""
