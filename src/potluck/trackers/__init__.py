"""Metrics where people keep them: each tracker is fed by a process of its own, which no step waits for."""
