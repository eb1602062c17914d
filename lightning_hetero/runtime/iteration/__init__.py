"""One iteration of a plan on one rank, from the batch to the summed gradients."""
