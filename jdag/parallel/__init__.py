"""Data parallelism: copies of parameters, chunks of rows, and sums of gradients."""
