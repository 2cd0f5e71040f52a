"""What a session is: its file, its members, and the control plane."""
