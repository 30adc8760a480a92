"""Distances, noise floor, tolerance, continuity, optimizer replay: traces in, a verdict out."""
