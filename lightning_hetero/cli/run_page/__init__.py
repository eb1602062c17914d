"""One page of a run: what its callbacks wrote, as a self-contained HTML file."""
