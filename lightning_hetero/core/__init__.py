"""Plain data that every layer shares: plans, clusters, schedules, errors. No torch in here."""
