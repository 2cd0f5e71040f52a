"""Tests of what needs several devices; `test_parallel.py` runs them with eight.

A process has its devices from its start or not at all, and how many there are changes
bits, so that these tests run in processes of their own. One file by itself:

    JAX_NUM_CPU_DEVICES=8 python -m pytest tests/unit/parallel/test_data.py
"""
