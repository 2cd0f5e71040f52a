"""README.md and docs/: their code runs, and every public name has a page."""
