"""What the peer does and what it fails at: one suite for every driver."""
