"""Workers and the work they were given."""
