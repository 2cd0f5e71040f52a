"""The public API: clusters, programs, collectives, pipelines, gradients."""
