"""An update that overflows in an arm: where, when, and what skipping it did."""
