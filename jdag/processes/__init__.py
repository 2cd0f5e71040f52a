"""The real driver: workers that are processes, on one host or on many."""
