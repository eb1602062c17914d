"""Parameters as slices with one owner each, and what computes with all of a parameter."""
