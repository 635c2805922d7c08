"""Bounded jobs: what each is, what may be asked for, and what is made of the answer. Nothing here runs a model."""
