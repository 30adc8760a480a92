"""Random numbers by example, and how the draws of a forward hold a batch."""
