"""Find stragglers of any job, without Lightning or a plan, from recordings and traces."""
