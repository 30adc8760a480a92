"""Noise floor, tolerance, continuity, optimizer replay: traces in, a verdict out."""
