"""Settings: structs with bounds, their parsing, and their error texts."""
