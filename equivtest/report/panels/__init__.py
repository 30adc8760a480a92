"""What the page draws of a case: one module a figure, pure, from what a record holds to places.

A figure's title says what the figure shows, and is worked out by rule from the same numbers.
"""
