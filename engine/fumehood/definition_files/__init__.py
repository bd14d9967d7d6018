"""Definition files (a part): tools whose definitions are in the files of a directory.

Host side, above the registry. `directory.py` reads the files, and `in_engine.py` follows their
changes while an engine runs.
"""
