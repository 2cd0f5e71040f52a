"""Facts of worker processes that break, leave, come back or go mad."""
