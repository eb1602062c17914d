"""What ranks that save or recover together tell and send each other, and waits that end."""
