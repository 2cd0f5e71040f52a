"""The runtime of one worker under both drivers: effects, statistics and traces."""
