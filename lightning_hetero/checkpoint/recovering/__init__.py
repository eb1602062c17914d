"""From what the tiers hold to a rank's state."""
