"""Mathematics on one worker: shapes, pytrees, forward/vjp pairs, values by key."""
