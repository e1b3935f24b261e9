"""Processes: started, watched, led and joined."""
