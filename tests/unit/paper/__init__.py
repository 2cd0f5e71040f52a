"""Tests of the scripts in `paper/`."""
