"""The known sources of divergence: each is detected, isolated while it stays on, and explained."""
