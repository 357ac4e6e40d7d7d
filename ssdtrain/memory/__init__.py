"""The memory that restored blocks live in."""
