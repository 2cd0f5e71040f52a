"""Routes, copies and sums over workers."""
