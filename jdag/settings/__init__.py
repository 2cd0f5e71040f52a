"""Settings: structs with bounds, how they are read, and what errors say."""
