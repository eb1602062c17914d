"""Parameters as slices with one owner each, and refusals of code that needs whole parameters."""
