"""Batched operations for stacked clients, each with its plain form as the test."""
