"""The result cache (a part): answers of cacheable tools, kept in memory for a limited time.

Host side. `gate.py` contains the cache's gate in the pipeline. `store.py` keeps the answers, and
lets identical calls wait for a single run. Invariants: only successful results are kept, never more
than the settings allow; an answer belongs to the principal and agent whose call made it.
"""
