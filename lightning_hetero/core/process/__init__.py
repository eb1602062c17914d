"""What a process knows of where it runs."""
