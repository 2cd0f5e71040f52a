"""Unit tests: `unit/ROOM/test_MODULE.py` is for `jdag/ROOM/MODULE.py`."""
