"""Facts of whole programs and random ones, in virtual time and over engines."""
