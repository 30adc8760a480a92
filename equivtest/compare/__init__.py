"""Distances, noise floor, tolerance, continuity, optimizer replay, verdict: traces in, records out."""
