"""Tests of the scenarios that are shipped."""
