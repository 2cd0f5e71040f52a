"""Sessions: the cluster file, the members, and the control plane."""
