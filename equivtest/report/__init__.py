"""Records of a run → results table → page."""
