"""A few examples of a group, and where they see each other."""
